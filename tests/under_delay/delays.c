/* Preloaded (ld.so(8)): some calls to the disk and the network begin late, by up to DELAY_UP_TO_MS milliseconds.
 *
 * Which calls, and by how much, is drawn from (DELAY_SEED, pid, number of the call in this process), so that a forked
 * process does not repeat its parent's delays. Every DELAY_DISK_ONE_IN-th call that changes the disk is late, and every
 * DELAY_NET_ONE_IN-th that sends or receives: of these there are thousands a second. Results and errno are the calls'
 * own.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

atomic_ullong samebits_late_calls; /* for who wants to know whether it works */
static atomic_ullong calls;

static uint64_t number_of(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text == NULL ? otherwise : strtoull(text, NULL, 10);
}

static uint64_t mixed(uint64_t x) { /* splitmix64 */
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static void be_late(const char *one_in_name, uint64_t one_in_otherwise) {
    int saved = errno;
    uint64_t one_in = number_of(one_in_name, one_in_otherwise);
    uint64_t up_to_us = 1000 * number_of("DELAY_UP_TO_MS", 200);
    uint64_t drawn = mixed(mixed(number_of("DELAY_SEED", 1)) ^ mixed((uint64_t)getpid()) ^ atomic_fetch_add(&calls, 1));
    if (one_in > 0 && up_to_us > 0 && drawn % one_in == 0) {
        uint64_t late_us = mixed(drawn) % (up_to_us + 1);
        atomic_fetch_add(&samebits_late_calls, 1);
        struct timespec left = {.tv_sec = late_us / 1000000, .tv_nsec = 1000 * (late_us % 1000000)};
        while (nanosleep(&left, &left) != 0 && errno == EINTR) {
        }
    }
    errno = saved;
}

#define LATE(one_in_name, one_in_otherwise, result, name, parameters, arguments)                                       \
    result name parameters {                                                                                           \
        static result(*next) parameters;                                                                               \
        if (next == NULL) next = (result(*) parameters)dlsym(RTLD_NEXT, #name);                                        \
        be_late(one_in_name, one_in_otherwise);                                                                        \
        return next arguments;                                                                                         \
    }
#define DISK(result, name, parameters, arguments) LATE("DELAY_DISK_ONE_IN", 5, result, name, parameters, arguments)
#define NET(result, name, parameters, arguments) LATE("DELAY_NET_ONE_IN", 200, result, name, parameters, arguments)

DISK(int, fsync, (int fd), (fd))
DISK(int, fdatasync, (int fd), (fd))
DISK(int, rename, (const char *from, const char *to), (from, to))
DISK(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to))
DISK(int, unlink, (const char *path), (path))
DISK(int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags))
NET(ssize_t, send, (int fd, const void *data, size_t size, int flags), (fd, data, size, flags))
NET(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
NET(ssize_t, sendto, (int fd, const void *data, size_t size, int flags, const struct sockaddr *to, socklen_t length),
    (fd, data, size, flags, to, length))
NET(ssize_t, recv, (int fd, void *data, size_t size, int flags), (fd, data, size, flags))
NET(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags))
NET(ssize_t, recvfrom, (int fd, void *restrict data, size_t size, int flags, struct sockaddr *restrict from,
                        socklen_t *restrict length),
    (fd, data, size, flags, from, length))
