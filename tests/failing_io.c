/* Counts the calls that change files below one folder, and disturbs one of them.

   test_failing_io.py compiles it, loads it with LD_PRELOAD and arms it by failing_io(). Linux only.
   It sees calls by these names alone. What a library writes by stdio's fwrite or a memory map goes
   past it: the test finds such files by their size at fsync. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, ONCE, FULL, BEFORE, TORN, HALF, READING }; /* modes, as in the test */
enum { CHANGES, GROWS, READS };                           /* kinds of calls: GROWS needs room */
enum { PASS, FAIL, CUT };                                 /* what a call has to do */

static char folder[PATH_MAX];
static int mode, error, log_fd = -1;
static long left; /* calls until the one to disturb; 0 and less: that was it */

/* From now on note in log each call on a folder and all below it, or on one file, and disturb the
   n-th: it fails once (ONCE), all that need room fail from it on (FULL), the process ends BEFORE
   it, or it writes a part, and then the next call fails (HALF) or the process ends (TORN). READING
   counts the calls that read, and the n-th fails. */
void failing_io(const char *below, int how, int with_errno, long n, int log) {
    snprintf(folder, sizeof folder, "%s", below);
    mode = how, error = with_errno, left = n, log_fd = log;
}

static int todo(const char *call, int kind, const char *path, long size) {
    int is_counted = (kind == READS) == (mode == READING);
    size_t n = strlen(folder);
    int is_below = !strncmp(path, folder, n) && (!path[n] || path[n] == '/');
    if (log_fd < 0 || !is_counted || !is_below) return PASS;
    dprintf(log_fd, "%s %d %ld %s\n", call, kind, size, path);
    left--;
    int is_due = left == 0 || (mode == FULL && left < 0 && kind == GROWS);
    if (!is_due || mode == COUNT) return PASS;
    if (mode == BEFORE) _exit(99);
    if ((mode == HALF || mode == TORN) && kind == GROWS && size > 1) {
        left = 1; /* the next call is due again, and finds nothing to halve */
        mode = mode == HALF ? ONCE : BEFORE;
        return CUT;
    }
    errno = error;
    return FAIL;
}

/* todo() of an open file, or of a name in an open folder. */
static int todo_at(const char *call, int kind, int fd, const char *name, long size) {
    char link[32], path[2 * PATH_MAX] = "";
    if (log_fd < 0) return PASS;
    if (name && (fd == AT_FDCWD || *name == '/')) return todo(call, kind, name, size);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, PATH_MAX - 1) < 0) return PASS;
    if (name) strcat(strcat(path, "/"), name);
    return todo(call, kind, path, size);
}

static long size_of(int fd) {
    struct stat status;
    return fstat(fd, &status) ? -1 : status.st_size;
}

static long total(const struct iovec *parts, int n) {
    long sum = 0;
    while (n--) sum += parts[n].iov_len;
    return sum;
}

/* Put ourselves before a function of libc. what: todo(); half: the call that writes a part. */
#define WRAP(type, name, parameters, arguments, failed, what, half)          \
    type name parameters {                                                   \
        static type(*real) parameters;                                       \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);       \
        int now = what;                                                      \
        if (now == FAIL) return failed;                                      \
        type result = now == CUT ? half : real arguments;                    \
        return result;                                                       \
    }
#define ON_FILE(type, name, parameters, arguments, kind, size, half) \
    WRAP(type, name, parameters, arguments, -1, todo_at(#name, kind, fd, 0, size), half)
#define ON_PATH(name, kind, parameters, arguments) \
    WRAP(int, name, parameters, arguments, -1, todo(#name, kind, path, 0), -1)

/* The third argument of open() is there only where a file may be made. */
#define OPEN(name, at, parameters, arguments)                                       \
    int name parameters {                                                           \
        static int(*real) parameters;                                               \
        if (!real) real = (int(*) parameters)dlsym(RTLD_NEXT, #name);               \
        va_list rest;                                                               \
        va_start(rest, flags);                                                      \
        int rights = flags & O_CREAT ? va_arg(rest, int) : 0;                       \
        va_end(rest);                                                               \
        int kind = flags & O_CREAT ? GROWS : CHANGES;                               \
        int writes = flags & (O_WRONLY | O_RDWR);                                   \
        int now = writes ? todo_at("open", kind, at, path, !!(flags & O_TRUNC)) : PASS; \
        if (now == FAIL) return -1;                                                 \
        int result = real arguments;                                                \
        return result;                                                              \
    }
OPEN(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags, rights))
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags, rights))
OPEN(openat, fd, (int fd, const char *path, int flags, ...), (fd, path, flags, rights))
OPEN(openat64, fd, (int fd, const char *path, int flags, ...), (fd, path, flags, rights))

/* The streams of C++ open their files by these, and write by write and writev. */
#define FOPEN(name)                                                            \
    WRAP(FILE *, name, (const char *path, const char *how), (path, how), NULL, \
         strpbrk(how, "wa+") ? todo("open", GROWS, path, *how == 'w') : PASS, NULL)
FOPEN(fopen)
FOPEN(fopen64)

#define DATA int fd, const void *data, size_t n
ON_FILE(ssize_t, write, (DATA), (fd, data, n), GROWS, n, real(fd, data, n / 2))
ON_FILE(ssize_t, pwrite, (DATA, off_t at), (fd, data, n, at), GROWS, n, real(fd, data, n / 2, at))
ON_FILE(ssize_t, pwrite64, (DATA, off64_t at), (fd, data, n, at), GROWS, n,
        real(fd, data, n / 2, at))
#define PARTS int fd, const struct iovec *parts, int n
ON_FILE(ssize_t, writev, (PARTS), (fd, parts, n), GROWS, total(parts, n), real(fd, parts, 1))
ON_FILE(int, ftruncate, (int fd, off_t size), (fd, size), CHANGES, size, -1)
ON_FILE(int, ftruncate64, (int fd, off64_t size), (fd, size), CHANGES, size, -1)
ON_FILE(int, fsync, (int fd), (fd), CHANGES, size_of(fd), -1)
ON_FILE(int, fdatasync, (int fd), (fd), CHANGES, size_of(fd), -1)
ON_FILE(ssize_t, read, (int fd, void *data, size_t n), (fd, data, n), READS, n, -1)
ON_FILE(ssize_t, pread64, (int fd, void *data, size_t n, off64_t at), (fd, data, n, at), READS, n,
        -1)

ON_PATH(truncate64, CHANGES, (const char *path, off64_t size), (path, size))
ON_PATH(mkdir, GROWS, (const char *path, mode_t rights), (path, rights))
ON_PATH(rename, CHANGES, (const char *path, const char *to), (path, to))
ON_PATH(rmdir, CHANGES, (const char *path), (path))
ON_PATH(unlink, CHANGES, (const char *path), (path))
WRAP(int, unlinkat, (int fd, const char *path, int flags), (fd, path, flags), -1,
     todo_at("unlink", CHANGES, fd, path, 0), -1)
