// A device that is not the CPU, for torch's PrivateUse1 slot: memory, streams, events, generators, operations.
//
// What it is for: whoever touches its memory from the host without a copy is ended by the kernel, whoever mixes its
// tensors with the host's is refused, and whoever forgets to wait for a copy on a stream of its own finds the bytes of
// before. What it is not: fast. Every operation runs on the CPU, between a copy in and a copy out.
//
// An address of this device is an address in a range without any rights (PROT_NONE); its bytes lie at the same offset
// of a second range that only this file knows. A copy on a stream other than the first waits in that stream's queue
// until somebody waits for the stream, or for an event that was recorded in it afterwards.
//
// TRIAL_LAG_US makes it slow: each operation takes so many microseconds more of the device's time, which passes while
// the host runs ahead. Whatever waits for the device waits for that time as well, and is counted (waits()).

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "device.h"

namespace trial {
namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr size_t GRAIN = 512;

size_t setting(const char* name, size_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

size_t memory_bytes() {
  static const size_t bytes = setting("TRIAL_DEVICE_BYTES", size_t{1} << 30);
  return bytes;
}

c10::DeviceIndex devices() {
  static const auto count = static_cast<c10::DeviceIndex>(setting("TRIAL_DEVICES", 1));
  return count;
}

std::atomic<bool> is_stopped{false};

enum class Context { SOUND, FAILS, HANGS };
std::atomic<Context> context{Context::SOUND};

// As CUDA's after an illegal access (every later call fails, in this process alone), or after a lost link (none ends).
void require_running() {
  TORCH_CHECK(!is_stopped, "FORCE STOP. The device is stopped: restart_device lets it go on");
  while (context == Context::HANGS) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  TORCH_CHECK(context != Context::FAILS, "trial error: unspecified launch failure");
}

// What other processes hold of the device's memory: the number in the file that TRIAL_HELD names.
size_t held_by_others() {
  static const char* path = std::getenv("TRIAL_HELD");
  if (path == nullptr) return 0;
  size_t held = 0;
  std::ifstream(path) >> held;
  return held;
}

// ---- time of the device's own

using Clock = std::chrono::steady_clock;

// When the device will have done what it was given; the host is only here ahead of it.
class Lag {
 public:
  void one_more() {
    if (each_.count() == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    until_ = std::max(until_, Clock::now()) + each_;
  }
  Clock::time_point until() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return until_;
  }
  void wait(Clock::time_point until) {
    if (is_of_an_operation || until <= Clock::now()) return;
    ++waits_;
    std::this_thread::sleep_until(until);
  }
  void wait() { wait(until()); }
  size_t waits() const { return waits_; }

  // Copies between the host and the device that an operation is made of here are none on a real device.
  static thread_local bool is_of_an_operation;

 private:
  const std::chrono::microseconds each_{setting("TRIAL_LAG_US", 0)};
  mutable std::mutex mutex_;
  Clock::time_point until_;
  std::atomic<size_t> waits_{0};
};

thread_local bool Lag::is_of_an_operation = false;

Lag& lag() {
  static auto* one = new Lag();
  return *one;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

// ---- memory

class Arena {
 public:
  void* allocate(size_t wanted, c10::DeviceIndex device) {
    if (wanted == 0) return nullptr;
    const size_t size = (wanted + GRAIN - 1) / GRAIN * GRAIN;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (bare_ == nullptr) reserve();
    const size_t held = held_by_others();
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
      if (gap->second < size || used_ + size + held > memory_bytes()) continue;
      const auto [offset, room] = *gap;
      gaps_.erase(gap);
      if (room > size) gaps_[offset + size] = room - size;
      taken_[offset] = size;
      used_ += size;
      most_ = std::max(most_, used_);
      return bare_ + offset;
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "trial out of memory. Tried to allocate ", wanted, " bytes. Device ", int(device),
        " has a total capacity of ", memory_bytes(), " bytes, of which this process has ", used_, " in use and others ",
        held);
  }

  void free(void* address) {
    if (address == nullptr) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto taken = taken_.find(static_cast<char*>(address) - bare_);
    auto [offset, size] = *taken;
    taken_.erase(taken);
    used_ -= size;
    auto after = gaps_.lower_bound(offset);
    if (after != gaps_.end() && offset + size == after->first) {
      size += after->second;
      after = gaps_.erase(after);
    }
    if (after != gaps_.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == offset) {
        before->second += size;
        return;
      }
    }
    gaps_[offset] = size;
  }

  void* bytes_of(const void* address) const {
    return address == nullptr ? nullptr : bytes_ + (static_cast<const char*>(address) - bare_);
  }

  size_t used() const { return used_; }
  size_t most() const { return most_; }

 private:
  void reserve() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    auto* bare = mmap(nullptr, memory_bytes(), PROT_NONE, flags, -1, 0);
    auto* bytes = mmap(nullptr, memory_bytes(), PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(bare != MAP_FAILED && bytes != MAP_FAILED, "trial: no addresses for ", memory_bytes(), " bytes");
    bytes_ = static_cast<char*>(bytes);
    gaps_[0] = memory_bytes() / GRAIN * GRAIN;
    bare_ = static_cast<char*>(bare);
  }

  std::mutex mutex_;
  char* bare_ = nullptr;
  char* bytes_ = nullptr;
  size_t used_ = 0, most_ = 0;
  std::map<size_t, size_t> gaps_, taken_;
};

Arena& arena() {
  static auto* one = new Arena();  // what lies in it is freed at the very end of the process
  return *one;
}

void free_in_arena(void* address) { arena().free(address); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = arena().allocate(size, current_device);
    return {address, address, &free_in_arena, c10::Device(KIND, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_in_arena; }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(arena().bytes_of(target), arena().bytes_of(source), size);
  }
};

Allocator the_allocator;
REGISTER_ALLOCATOR(KIND, &the_allocator);

// ---- streams and events

struct Event {
  c10::Stream stream;
  size_t position;
  Clock::time_point until;
};

class Queues {
 public:
  void add(const c10::Stream& stream, std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queues_[key(stream)].waiting.push_back(std::move(task));
  }

  size_t length(const c10::Stream& stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto& queue = queues_[key(stream)];
    return queue.begun + queue.waiting.size();
  }

  bool has_reached(const c10::Stream& stream, size_t position) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return queues_[key(stream)].done >= position;
  }

  bool is_idle(const c10::Stream& stream) { return has_reached(stream, length(stream)); }

  // Streams run beside each other, each in the thread that waits for it. A task may wait for a collective, or for what
  // another stream has yet to do.
  void run(const c10::Stream& stream, size_t position) {
    if (has_reached(stream, position)) return;
    auto& queue = of(stream);
    const std::lock_guard<std::recursive_mutex> running(queue.running);
    while (auto task = next(queue, position)) {
      const auto over = c10::make_scope_exit([&] {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++queue.done;
      });
      task();
    }
  }

  void run(const c10::Stream& stream) { run(stream, length(stream)); }

  void run_all(c10::DeviceIndex device) {
    std::vector<c10::StreamId> streams;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [key, queue] : queues_)
        if (key.first == device) streams.push_back(key.second);
    }
    for (const auto id : streams) run(c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), id));
  }

 private:
  struct Queue {
    std::recursive_mutex running;  // held while its tasks run
    std::deque<std::function<void()>> waiting;
    size_t begun = 0, done = 0;
  };
  using Key = std::pair<c10::DeviceIndex, c10::StreamId>;

  Queue& of(const c10::Stream& stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return queues_[key(stream)];
  }

  std::function<void()> next(Queue& queue, size_t position) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue.begun >= position || queue.waiting.empty()) return nullptr;
    auto task = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    ++queue.begun;
    return task;
  }

  static Key key(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  std::mutex mutex_;  // of the map and its numbers
  std::map<Key, Queue> queues_;
};

Queues& queues() {
  static auto* one = new Queues();
  return *one;
}

std::atomic<int64_t> last_stream{0};

c10::Stream stream_of(c10::Device device) {
  return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {KIND, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < devices(), "trial: there is no device ", int(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return devices(); }

  c10::Stream getStream(c10::Device device) const override { return stream_of(whole(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, whole(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, whole(device), ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = stream_of(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queues().is_idle(stream) && lag().until() <= Clock::now();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queues().run(stream);
    lag().wait();
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    queues().run_all(device);
    lag().wait();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    *event = new Event{stream, queues().length(stream), lag().until()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const auto awaited = *static_cast<Event*>(event);
    if (stream.id() == 0)
      queues().run(awaited.stream, awaited.position);
    else
      queues().add(stream, [awaited] { queues().run(awaited.stream, awaited.position); });
  }
  bool queryEvent(void* event) const override {
    const auto* one = static_cast<Event*>(event);
    return one == nullptr || (queues().has_reached(one->stream, one->position) && one->until <= Clock::now());
  }
  void synchronizeEvent(void* event) const override {
    const auto* one = static_cast<Event*>(event);
    if (one == nullptr) return;
    queues().run(one->stream, one->position);
    lag().wait(one->until);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

 private:
  static c10::Device whole(c10::Device device) {
    return device.has_index() ? device : c10::Device(KIND, current_device);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- generators: numbers are drawn on the CPU, from a state of the device's own

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index, at::Generator drawn_from)
      : c10::GeneratorImpl(c10::Device(KIND, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(drawn_from)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), inner.clone()); }
  at::Generator inner;
};

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<Generator>(index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex one = 0; one < devices(); ++one) made->push_back(new_generator(one));
    return made;
  }();
  return all->at(index < 0 ? current_device : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? current_device : index);
  }
  c10::Device getDeviceFromPtr(void*) const override { return {KIND, current_device}; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = the_allocator.allocate(size);
    if (const auto kept = std::min(size, storage.nbytes()); kept > 0)
      the_allocator.copy_data(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

Hooks the_hooks;

// ---- operations

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, &the_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &the_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  require_running();
  const auto device = source.device().type() == KIND ? source.device() : target.device();
  const auto stream = stream_of(device);
  auto copy = [source, target] { on_host(target).copy_(on_host(source)); };
  if (non_blocking && stream.id() != 0) {
    queues().add(stream, copy);
  } else {
    queues().run(stream);
    if (target.is_cpu()) lag().wait();
    copy();
  }
  return target;
}

const at::Tensor& resize_to(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  if (format.has_value()) tensor->empty_tensor_restride(*format);
  const size_t needed = (tensor->numel() + tensor->storage_offset()) * tensor->itemsize();
  if (needed > tensor->storage().nbytes()) the_hooks.resizePrivateUse1Bytes(tensor->storage(), needed);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  resize_to(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor& self) {
  require_running();
  queues().run(stream_of(self.device()));
  lag().wait();
  return on_host(self).item();
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  if (stride.empty())
    tensor->set_sizes_contiguous(size);
  else
    tensor->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {length}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  const auto host_bias = bias.has_value() && bias->defined() ? std::optional(on_host(*bias)) : std::nullopt;
  return at::convolution(
             on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  const std::vector<int64_t> of_bias{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  const auto [of_input, of_weight, summed] = at::convolution_backward(
      on_host(grad), on_host(input), on_host(weight), of_bias, stride, padding, dilation, transposed, output_padding,
      groups, mask);
  const auto there = [&](const at::Tensor& one) { return one.defined() ? one.to(input.device()) : one; };
  return {there(of_input), there(of_weight), there(summed)};
}

void record_stream(at::Tensor&, c10::Stream) {}  // what waits in a queue holds its tensors

bool is_of_host(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu() && value.toTensor().dim() > 0;
}

bool is_of_device(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == KIND;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  require_running();
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->size() - arguments.size();
  bool host = false, device = false;
  for (size_t index = 0; index < arguments.size(); ++index) {
    auto& value = (*stack)[begin + index];
    if (value.isTensorList()) {
      for (const at::Tensor& one : value.toTensorVector()) {
        host |= is_of_host(one);
        device |= is_of_device(one);
      }
    }
    host |= is_of_host(value);
    device |= is_of_device(value);
    if (arguments[index].type()->annotation_str().find("Generator") != std::string::npos) {
      const auto& chosen = value.isNone() ? default_generator(current_device) : value.toGenerator();
      if (chosen.device().type() == KIND) value = static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->inner;
    }
  }
  TORCH_CHECK(
      !(host && device), "Expected all tensors to be on the same device, but found trial and cpu, in ",
      toString(op.schema().operator_name()));
  queues().run(stream_of(c10::Device(KIND, current_device)));
  {
    const bool is_inside = std::exchange(Lag::is_of_an_operation, true);
    const auto over = c10::make_scope_exit([is_inside] { Lag::is_of_an_operation = is_inside; });
    at::native::cpu_fallback(op, stack);
  }
  lag().one_more();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize_to);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("record_stream", record_stream);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

}  // namespace

bool ends_by_stop() {
  static const bool does = setting("TRIAL_STOPS", 0) != 0;
  return does;
}

bool has_stopped() { return is_stopped; }

void add_to_stream(std::function<void()> task) {
  queues().add(stream_of(c10::Device(KIND, current_device)), std::move(task));
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().type() != KIND) return tensor;
  return at::from_blob(
      arena().bytes_of(tensor.data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

void add_device(pybind11::module_& module) {
  at::RegisterPrivateUse1HooksInterface(&the_hooks);
  module.def("device_count", [] { return int(devices()); });
  module.def("current_device", [] { return int(current_device); });
  module.def("set_device", [](int index) { Guard().setDevice({KIND, c10::DeviceIndex(index)}); });
  module.def(
      "synchronize", [](int index) { Guard().synchronizeDevice(c10::DeviceIndex(index)); },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("waits", [] { return lag().waits(); });
  module.def("streams", [] { return int64_t(last_stream); });
  module.def("sleep", [](double seconds) {
    add_to_stream([seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  });
  module.def("default_generator", [](int index) { return default_generator(c10::DeviceIndex(index)); });
  if (ends_by_stop()) {
    module.def("stop_device", [](int) { is_stopped = true; });
    module.def("restart_device", [](int) { is_stopped = false; });
  }
  module.def("lose_context", [](bool hangs) { context = hangs ? Context::HANGS : Context::FAILS; });
  module.def("held_by_others", &held_by_others);
  module.def("memory_allocated", [] { return arena().used(); });
  module.def("max_memory_allocated", [] { return arena().most(); });
  module.def("total_memory", [] { return memory_bytes(); });
}

}  // namespace trial
