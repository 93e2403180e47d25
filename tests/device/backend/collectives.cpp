// Collectives between devices of this kind, over connections of their own on this host.
//
// They behave as NCCL's do where that matters to whoever must survive: the connections are made from what the ranks
// leave in the store, each rank runs what it is given in order in a thread of its own, a peer that dies is not noticed
// (everybody waits for ever), and abort() from any thread ends whatever waits. With TRIAL_STOPS=1 they behave as HCCL's:
// only stopping the device ends what waits. Sums are made in the order of the ranks.
//
// TRIAL_ABORT=undefined: as NCCL's kernels, a collective is awaited by the stream and not by wait(), and one that is
// aborted ends without an error and leaves any bytes in its output. TRIAL_ABORT=hangs: abort() never returns.
// TRIAL_ABORT=unheard: awaited by the stream as well, and never ended by abort(). TRIAL_ABORT=pairs: likewise for
// sends and receives only, as NCCL2's abort leaves the communicators of pairs. Collectives that are launched while
// hold_collectives(true) is in force wait as for a peer that is gone.
//
// TRIAL_ABORT=locked: as torch's non-blocking communicators (NCCLComm::waitReady), connecting returns at once, the first
// launch waits for the connections and holds the communicator's lock meanwhile, and abort() waits for that lock.
// TRIAL_ABORT=spins: a launch that waits for a peer uses a whole core and does not notice that the communicator was
// aborted (C10D_NCCL_CHECK_TIMEOUT_GROUPEND: NCCL leaves the state of an aborted communicator unset).
//
// TRIAL_ABORT=waits: as ncclCommAbort, which waits for the whole device, abort() returns when no communicator of this
// process has a collective running (pytorch#119797).
//
// TRIAL_SHARED=0: two ranks on one device are refused when they connect, as by NCCL (init.cc, "Duplicate GPU detected").
// TRIAL_SHARED=asked: they are refused in NCCL 2.30's words, unless NCCL_MULTI_RANK_GPU_ENABLE=1.
//
// As with NCCL, a communicator that is still connecting can be aborted only if TORCH_NCCL_USE_COMM_NONBLOCKING=1: else
// abort() waits for the connecting call, which waits for a dead peer for ever (pytorch#103264). Each communicator has a
// name in the folder TRIAL_SHARED_MEMORY, as NCCL's have in /dev/shm; a killed process leaves it behind (nccl#525).

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <thread>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "device.h"

namespace trial {
namespace {

constexpr int LOOK_MS = 20;  // how long an abort may go unseen by who waits for nothing else
constexpr auto LAUNCHED_WITHIN = std::chrono::seconds(120);  // TORCH_NCCL_NONBLOCKING_TIMEOUT

std::atomic<bool> are_held{false};
std::atomic<int> running{0};  // collectives, of all communicators

bool aborts(const char* how) {
  static const char* set = std::getenv("TRIAL_ABORT");
  return set != nullptr && std::string(set) == how;
}

bool is_nonblocking() {
  const char* set = std::getenv("TORCH_NCCL_USE_COMM_NONBLOCKING");
  return ends_by_stop() || (set != nullptr && std::string(set) == "1");
}

// The name of a communicator in shared memory, or in the folder that stands for it.
class SharedName {
 public:
  SharedName() {
    const char* folder = std::getenv("TRIAL_SHARED_MEMORY");
    if (folder == nullptr) return;
    path_ = std::string(folder) + "/nccl-XXXXXX";
    const int made = mkstemp(path_.data());
    TORCH_CHECK(made >= 0, "trial: no name in ", folder);
    close(made);
  }
  ~SharedName() {
    if (!path_.empty()) unlink(path_.c_str());
  }

 private:
  std::string path_;
};

using Bytes = std::vector<char>;
using Task = std::function<void()>;

struct Way {
  char* at = nullptr;
  size_t left = 0;
};

struct Descriptor {
  int number;
  ~Descriptor() { close(number); }
};

struct Work final : c10d::Work {
  Work(int rank, c10d::OpType type, std::vector<at::Tensor> outputs)
      : c10d::Work(rank, type), outputs_(std::move(outputs)) {
    std::vector<c10::Device> devices;
    if (!outputs_.empty() && !outputs_[0].is_cpu()) devices.push_back(outputs_[0].device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  }
  void end(std::exception_ptr error) {
    ended_.set_value();  // first: completing the future asks for the streams, which a thread that waits has locked
    if (error)
      future_->setError(error);
    else
      future_->markCompleted(c10::IValue(outputs_));
    finish(error);
  }
  void leave_any_bytes() {
    for (const auto& one : outputs_) std::memset(on_host(one).data_ptr(), 0xff, one.nbytes());  // NaN, if it is float
  }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!aborts("undefined") && !aborts("unheard") && !aborts("pairs")) return c10d::Work::wait(timeout);
    add_to_stream([ended = has_ended_] { ended.wait(); });
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override {}

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::promise<void> ended_;
  std::shared_future<void> has_ended_ = ended_.get_future().share();
};

// A collective of gloo's on host copies of this device's tensors, as ProcessGroupGlooCuda.cpp makes for CUDA's: its
// result is copied back when it is awaited.
struct Staged final : c10d::Work {
  Staged(
      c10::intrusive_ptr<c10d::Work> inner, std::vector<at::Tensor> tensors, std::vector<at::Tensor> copies,
      std::vector<at::Tensor> outputs)
      : inner_(std::move(inner)), tensors_(std::move(tensors)), copies_(std::move(copies)), outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{outputs_.at(0).device()})) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  bool wait(std::chrono::milliseconds timeout) override {
    inner_->wait(timeout);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (future_->completed()) return true;
    const at::NoGradGuard no_grad;
    for (size_t index = 0; index < tensors_.size(); ++index)
      if (!tensors_[index].cpu().equal(copies_[index])) tensors_[index].copy_(copies_[index]);
    future_->markCompleted(c10::IValue(outputs_));
    return true;
  }

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
  std::vector<at::Tensor> tensors_, copies_, outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::mutex mutex_;
};

Bytes bytes_of(const at::Tensor& tensor) {
  const auto whole = on_host(tensor).contiguous();
  const auto* begin = static_cast<const char*>(whole.data_ptr());
  return {begin, begin + whole.nbytes()};
}

void fill(const at::Tensor& tensor, const char* bytes) {
  const auto host = on_host(tensor);
  host.copy_(at::from_blob(const_cast<char*>(bytes), host.sizes(), host.options()));
}

at::Tensor summed(const at::Tensor& like, const std::vector<Bytes>& parts, const c10d::ReduceOp& op) {
  const auto host = on_host(like);
  const auto part = [&](size_t rank) {
    return at::from_blob(const_cast<char*>(parts[rank].data()), host.sizes(), host.options());
  };
  auto sum = part(0).clone();
  for (size_t rank = 1; rank < parts.size(); ++rank) {
    if (op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG)
      sum.add_(part(rank));
    else if (op == c10d::ReduceOp::MAX)
      sum = at::maximum(sum, part(rank));
    else if (op == c10d::ReduceOp::MIN)
      sum = at::minimum(sum, part(rank));
    else
      TORCH_CHECK(false, "trial collectives do not know this reduction");
  }
  return op == c10d::ReduceOp::AVG ? sum.div_(static_cast<int64_t>(parts.size())) : sum;
}

class Collectives final : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : c10d::Backend(rank, size), store_(std::move(store)), peers_(size, -1), thread_([this] { run(); }) {}

  ~Collectives() override {
    give_up();
    const auto end = [this] {
      thread_.join();
      for (int one : peers_)
        if (one >= 0) close(one);
    };
    if (PyGILState_Check()) {
      const pybind11::gil_scoped_release release;
      end();
    } else {
      end();
    }
  }

  const std::string getBackendName() const override { return "trialccl"; }

  void eagerConnectSingleDevice(at::Device device) override {
    device_ = device.index();
    auto connecting = submit(c10d::OpType::UNKNOWN, {}, [this] { connect(); });
    if (!aborts("locked")) connecting->wait();
  }

  void abort() override {
    while (aborts("hangs") || (is_connecting_ && !is_nonblocking()))
      std::this_thread::sleep_for(std::chrono::milliseconds(LOOK_MS));
    const std::lock_guard<std::mutex> lock(ready_);
    if (!ends_by_stop() && !aborts("unheard")) give_up();
    while (aborts("waits") && running > 0) std::this_thread::sleep_for(std::chrono::milliseconds(LOOK_MS));
  }
  void shutdown() override { abort(); }
  uint64_t getSequenceNumberForGroup() override { return launched_; }  // without sends and receives, as NCCL's

  void give_up() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      aborted_ = true;
    }
    changed_.notify_all();
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts)
      override {
    const auto tensor = one_of(tensors);
    return submit(c10d::OpType::ALLREDUCE, tensors, [this, tensor, op = opts.reduceOp] {
      on_host(tensor).copy_(summed(tensor, gathered(bytes_of(tensor)), op));
    });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts)
      override {
    const auto tensor = one_of(tensors);
    return submit(c10d::OpType::BROADCAST, tensors, [this, tensor, root = int(opts.rootRank)] {
      std::vector<Way> out(getSize()), in(getSize());
      auto bytes = bytes_of(tensor);
      if (getRank() == root)
        std::fill(out.begin(), out.end(), Way{bytes.data(), bytes.size()});
      else
        in[root] = {bytes.data(), bytes.size()};
      exchange(out, in);
      if (getRank() != root) fill(tensor, bytes.data());
    });
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions&) override {
    const auto input = one_of(inputs);
    return submit(c10d::OpType::ALLGATHER, outputs.at(0), [this, input, targets = outputs.at(0)] {
      const auto parts = gathered(bytes_of(input));
      for (size_t rank = 0; rank < parts.size(); ++rank) fill(targets[rank], parts[rank].data());
    });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return submit(c10d::OpType::_ALLGATHER_BASE, {output}, [this, output, input] {
      Bytes all;
      for (const auto& part : gathered(bytes_of(input))) all.insert(all.end(), part.begin(), part.end());
      fill(output, all.data());
    });
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return submit(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, [this, output, input, op = opts.reduceOp] {
      const auto sum = summed(input, gathered(bytes_of(input)), op);
      on_host(output).copy_(sum.chunk(getSize())[getRank()].view(output.sizes()));
    });
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return submit(c10d::OpType::BARRIER, {}, [this] { gathered({0}); });
  }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int rank, int) override {
    return submit(c10d::OpType::SEND, tensors, [this, rank, bytes = bytes_of(one_of(tensors))]() mutable {
      std::vector<Way> out(getSize()), in(getSize());
      out[rank] = {bytes.data(), bytes.size()};
      exchange(out, in);
    });
  }

  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int rank, int) override {
    return submit(c10d::OpType::RECV, tensors, [this, rank, tensor = one_of(tensors)] {
      std::vector<Way> out(getSize()), in(getSize());
      Bytes bytes(tensor.nbytes());
      in[rank] = {bytes.data(), bytes.size()};
      exchange(out, in);
      fill(tensor, bytes.data());
    });
  }

 private:
  static at::Tensor one_of(const std::vector<at::Tensor>& tensors) {
    TORCH_CHECK(tensors.size() == 1, "trial collectives take one tensor");
    TORCH_CHECK(!tensors[0].is_cpu(), "No backend type associated with device type cpu: trial collectives take none");
    return tensors[0];
  }

  c10::intrusive_ptr<c10d::Work> submit(c10d::OpType type, std::vector<at::Tensor> outputs, Task task) {
    if (!outputs.empty()) device_ = outputs[0].device().index();
    auto work = c10::make_intrusive<Work>(getRank(), type, std::move(outputs));
    if (type != c10d::OpType::UNKNOWN) wait_to_launch();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      check();
      launched_ += type != c10d::OpType::UNKNOWN && !is_pairwise(type);
      tasks_.emplace_back(work, std::move(task));
    }
    changed_.notify_all();
    return work;
  }

  void wait_to_launch() {
    const auto until = std::chrono::steady_clock::now() + LAUNCHED_WITHIN;
    const auto require_time = [until] {
      if (std::chrono::steady_clock::now() > until) C10_THROW_ERROR(DistBackendError, "trial timeout in a launch");
    };
    if (aborts("locked")) {
      const std::lock_guard<std::mutex> lock(ready_);
      while (!connected_) {
        require_time();
        std::this_thread::sleep_for(std::chrono::milliseconds(LOOK_MS));
      }
    }
    while (aborts("spins") && are_held) require_time();  // torch yields, which leaves the core busy if it is free
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return aborted_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto [work, task] = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      const bool runs = work->retrieveOpType() != c10d::OpType::UNKNOWN;
      running += runs;
      const auto over = c10::make_scope_exit([runs] { running -= runs; });
      try {
        check();
        if (work->retrieveOpType() != c10d::OpType::UNKNOWN) {
          connect();
          while (are_held) {
            if (!aborts("pairs") || !is_pairwise(work->retrieveOpType())) check();
            std::this_thread::sleep_for(std::chrono::milliseconds(LOOK_MS));
          }
        }
        task();
        work->end(nullptr);
      } catch (...) {
        if (aborted_ && aborts("undefined") && work->retrieveOpType() != c10d::OpType::UNKNOWN) {
          work->leave_any_bytes();
          work->end(nullptr);
        } else {
          work->end(std::current_exception());
        }
      }
      work.reset();
      task = nullptr;
      lock.lock();
    }
  }

  static bool is_pairwise(c10d::OpType type) { return type == c10d::OpType::SEND || type == c10d::OpType::RECV; }

  void check() {
    TORCH_CHECK(!has_stopped(), "FORCE STOP. The device is stopped");
    if (aborted_) C10_THROW_ERROR(DistBackendError, "trial communicator was aborted");
  }

  void connect() {
    if (connected_) return;
    is_connecting_ = true;
    const auto over = c10::make_scope_exit([this] { is_connecting_ = false; });
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const Descriptor closed_at_the_end{listener};
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof own;
    TORCH_CHECK(bind(listener, reinterpret_cast<sockaddr*>(&own), length) == 0 && listen(listener, getSize()) == 0);
    getsockname(listener, reinterpret_cast<sockaddr*>(&own), &length);
    require_own_device();
    store_->set("port/" + std::to_string(getRank()), std::to_string(ntohs(own.sin_port)));
    for (int rank = 0; rank < getRank(); ++rank) {
      const auto port = store_->get("port/" + std::to_string(rank));
      sockaddr_in there = own;
      there.sin_port = htons(std::stoi(std::string(port.begin(), port.end())));
      const int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      peers_[rank] = made;  // to be closed, however this ends
      while (::connect(made, reinterpret_cast<sockaddr*>(&there), sizeof there) != 0) {
        check();
        std::this_thread::sleep_for(std::chrono::milliseconds(LOOK_MS));  // a peer that is dead: as for ever
      }
      int32_t self = getRank();
      TORCH_CHECK(::send(made, &self, sizeof self, MSG_NOSIGNAL) == sizeof self);
      keep(made, rank);
    }
    for (int missing = getSize() - 1 - getRank(); missing > 0; --missing) {
      pollfd waiting{listener, POLLIN, 0};
      while (poll(&waiting, 1, LOOK_MS) == 0) check();
      const int made = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      int32_t peer = -1;
      TORCH_CHECK(::recv(made, &peer, sizeof peer, MSG_WAITALL) == sizeof peer && peer > getRank() && peer < getSize());
      keep(made, peer);
    }
    connected_ = true;
  }

  void require_own_device() {
    static const char* shared = std::getenv("TRIAL_SHARED");
    static const char* enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (shared == nullptr) return;
    const bool is_asked = std::string(shared) == "asked";
    if (is_asked ? enabled != nullptr && std::string(enabled) == "1" : std::string(shared) != "0") return;
    store_->set("device/" + std::to_string(getRank()), std::to_string(int(device_)));
    for (int rank = 0; rank < getSize(); ++rank) {
      if (rank == getRank()) continue;
      const auto told = store_->get("device/" + std::to_string(rank));
      if (std::string(told.begin(), told.end()) != std::to_string(int(device_))) continue;
      if (is_asked)
        C10_THROW_ERROR(
            DistBackendError,
            "trial invalid usage\nLast error:\nMultiple Ranks are using the same GPU/Partition. Set "
            "NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.");
      else
        C10_THROW_ERROR(
            DistBackendError, "trial invalid usage\nLast error:\nDuplicate GPU detected : rank " +
                std::to_string(getRank()) + " and rank " + std::to_string(rank) + " both on trial device " +
                std::to_string(int(device_)));
    }
  }

  void keep(int made, int rank) {
    const int yes = 1;
    setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    fcntl(made, F_SETFL, O_NONBLOCK);
    peers_[rank] = made;
  }

  std::vector<Bytes> gathered(Bytes own) {
    std::vector<Bytes> parts(getSize(), Bytes(own.size()));
    std::vector<Way> out(getSize(), Way{own.data(), own.size()}), in(getSize());
    for (int rank = 0; rank < getSize(); ++rank) in[rank] = {parts[rank].data(), parts[rank].size()};
    exchange(out, in);
    parts[getRank()] = std::move(own);
    return parts;
  }

  // To each peer what is on its way out, from each what is on its way in, both at once.
  void exchange(std::vector<Way>& out, std::vector<Way>& in) {
    out[getRank()].left = in[getRank()].left = 0;
    while (true) {
      check();
      std::vector<pollfd> waiting;
      bool is_done = true;
      for (int rank = 0; rank < getSize(); ++rank) {
        is_done &= out[rank].left == 0 && in[rank].left == 0;
        const short wanted = short((out[rank].left ? POLLOUT : 0) | (in[rank].left ? POLLIN : 0));
        waiting.push_back({wanted && peers_[rank] >= 0 ? peers_[rank] : -1, wanted, 0});
      }
      if (is_done) return;
      poll(waiting.data(), waiting.size(), LOOK_MS);
      bool has_moved = false;
      for (int rank = 0; rank < getSize(); ++rank) {
        if (waiting[rank].revents & POLLOUT)
          has_moved |= move(out[rank], ::send(peers_[rank], out[rank].at, out[rank].left, MSG_NOSIGNAL));
        if (waiting[rank].revents & POLLIN)
          has_moved |= move(in[rank], ::recv(peers_[rank], in[rank].at, in[rank].left, 0));
      }
      if (!has_moved) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // a peer may be gone: say nothing
    }
  }

  static bool move(Way& way, ssize_t moved) {
    if (moved <= 0) return false;
    way.at += moved;
    way.left -= moved;
    return true;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<int> peers_;
  std::atomic<c10::DeviceIndex> device_{0};
  std::atomic<bool> connected_{false};
  std::mutex ready_;  // held while a launch waits for the connections
  std::atomic<bool> is_connecting_{false};
  uint64_t launched_ = 0;
  SharedName name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<c10::intrusive_ptr<Work>, Task>> tasks_;
  std::atomic<bool> aborted_{false};
  std::thread thread_;
};

}  // namespace

void add_collectives(pybind11::module_& module) {
  pybind11::class_<Collectives, c10::intrusive_ptr<Collectives>, c10d::Backend> kind(module, "Collectives");
  kind.def(pybind11::init<c10::intrusive_ptr<c10d::Store>, int, int>());
  module.def(
      "staged",
      [](c10::intrusive_ptr<c10d::Work> inner, std::vector<at::Tensor> tensors, std::vector<at::Tensor> copies,
         std::vector<at::Tensor> outputs) -> c10::intrusive_ptr<c10d::Work> {
        return c10::make_intrusive<Staged>(
            std::move(inner), std::move(tensors), std::move(copies), std::move(outputs));
      });
  module.def("hold_collectives", [](bool held) { are_held = held; });
  if (ends_by_stop()) kind.def("abort_hccl_comm", [](Collectives& self, const std::string&) { self.give_up(); });
}

}  // namespace trial

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  trial::add_device(module);
  trial::add_collectives(module);
}
