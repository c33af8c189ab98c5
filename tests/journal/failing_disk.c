/* A disk that fails once: the Nth open, write, sync or truncate under a directory ends in an error.

   Loaded in front of libc with LD_PRELOAD. `disk_fail_at` arms it and `disk_calls` tells how many
   calls were counted since; until it is armed nothing is counted and nothing fails. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char directory[PATH_MAX];
static long fail_at, calls;
static int fail_with;

void disk_fail_at(const char *under, long nth, int error) {
    snprintf(directory, sizeof directory, "%s", under);
    calls = 0;
    fail_at = nth;
    fail_with = error;
}

long disk_calls(void) { return calls; }

static int fails(const char *path) {
    if (!directory[0] || strncmp(path, directory, strlen(directory)) != 0) return 0;
    if (++calls != fail_at) return 0;
    errno = fail_with;
    return 1;
}

static int fails_on(int descriptor) {
    char link[64], path[PATH_MAX];
    if (!directory[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                  \
    int name(const char *path, int flags, ...) {                    \
        va_list rest;                                               \
        va_start(rest, flags);                                      \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;   \
        va_end(rest);                                               \
        return fails(path) ? -1 : REAL(name)(path, flags, mode);    \
    }

#define ON_DESCRIPTOR(type, name, parameters, arguments) \
    type name parameters { return fails_on(fd) ? -1 : REAL(name) arguments; }

OPEN(open)
OPEN(open64)
ON_DESCRIPTOR(ssize_t, write, (int fd, const void *from, size_t size), (fd, from, size))
ON_DESCRIPTOR(ssize_t, pwrite, (int fd, const void *from, size_t size, off_t at),
              (fd, from, size, at))
ON_DESCRIPTOR(ssize_t, pwrite64, (int fd, const void *from, size_t size, off64_t at),
              (fd, from, size, at))
ON_DESCRIPTOR(int, fsync, (int fd), (fd))
ON_DESCRIPTOR(int, fdatasync, (int fd), (fd))
ON_DESCRIPTOR(int, ftruncate, (int fd, off_t size), (fd, size))
ON_DESCRIPTOR(int, ftruncate64, (int fd, off64_t size), (fd, size))
