/* A library that a drill preloads into its own processes: the wall clock is off, and writes to one folder fail.
 *
 * It stands between the C library and the program (ld.so(8), LD_PRELOAD), so the machine's clock and disk are never
 * touched, and every program of the job meets the same. What is on is said by a file that the drill keeps mapped: see
 * `preloaded.py`, which has the same layout. Where there is no such file, every call passes through.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    volatile int64_t ahead_s;  /* of CLOCK_REALTIME */
    volatile int64_t error;    /* errno of writes to `folder`; 0: they succeed */
    volatile int64_t refused;  /* calls that were refused for that */
    char folder[4000];
};

static struct control *control;

__attribute__((constructor)) static void open_control(void) {
    const char *path = getenv("SAMEBITS_DRILL_CONTROL");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (found != MAP_FAILED)
        control = found;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t clock, struct timespec *at) {
    REAL(clock_gettime);
    int result = real(clock, at);
    if (result == 0 && control && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        at->tv_sec += control->ahead_s;
    return result;
}

int gettimeofday(struct timeval *at, void *zone) {
    REAL(gettimeofday);
    int result = real(at, zone);
    if (result == 0 && control)
        at->tv_sec += control->ahead_s;
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}

static int is_refused(int fd) {
    char link[64], path[4096];
    if (!control || !control->error)
        return 0;
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    size_t folder = strlen(control->folder);
    if (length <= (ssize_t)folder || memcmp(path, control->folder, folder) || path[folder] != '/')
        return 0;
    __atomic_add_fetch(&control->refused, 1, __ATOMIC_RELAXED);
    return 1;
}

#define REFUSE(fd) \
    if (is_refused(fd)) { \
        errno = (int)control->error; \
        return -1; \
    }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    REFUSE(fd)
    return real(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    REFUSE(fd)
    return real(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    REFUSE(fd)
    return real(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    REFUSE(fd)
    return real(fd, parts, count);
}

int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    REFUSE(fd)
    return real(fd, size);
}

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    REFUSE(fd)
    return real(fd, size);
}

int posix_fallocate(int fd, off_t at, off_t size) {
    REAL(posix_fallocate);
    return is_refused(fd) ? (int)control->error : real(fd, at, size);
}

int posix_fallocate64(int fd, off64_t at, off64_t size) {
    REAL(posix_fallocate64);
    return is_refused(fd) ? (int)control->error : real(fd, at, size);
}
