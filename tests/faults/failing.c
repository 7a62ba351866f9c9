/* Fails a share of the filesystem calls below a directory: before they have an effect, or after it,
   or in the middle of their data. To be preloaded; FAILING_RATE is the share, FAILING_ROOT a part
   of the paths, and FAILING_ERROR the only error, if it is given. Python and its libraries call these functions, whatever their language. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const int errors[] = {EIO, ESTALE, ENOSPC, EDQUOT, EINTR, ETIMEDOUT, EAGAIN};

static int hits(void) {
  static __thread pid_t seeded;
  static __thread unsigned seed;
  const char *rate = getenv("FAILING_RATE");
  if (seeded != getpid()) { /* a forked process draws numbers of its own */
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    seeded = getpid();
    seed = now.tv_nsec ^ seeded * 2654435761u;
  }
  if (!rate || rand_r(&seed) / (double)RAND_MAX >= atof(rate)) return 0;
  const char *error = getenv("FAILING_ERROR");
  errno = error ? atoi(error) : errors[rand_r(&seed) % (sizeof errors / sizeof *errors)];
  return 1 + rand_r(&seed) % 2; /* 1: before, 2: after or in part */
}

static int below(const char *path) {
  const char *root = getenv("FAILING_ROOT");
  return root && path && strstr(path, root);
}

static int fd_below(int fd) {
  char name[64], path[4096];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(name, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return below(path);
}

static int at_below(int dir, const char *path) {
  char here[4096];
  if (!path) return 0;
  if (path[0] == '/') return below(path);
  if (dir != AT_FDCWD) return fd_below(dir);
  return below(path) || (getcwd(here, sizeof here) && below(here));
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = dlsym(RTLD_NEXT, #name)

/* A call that changes a name: its effect may be there although it reports a failure. */
#define CHANGE(name, arguments, call, where) \
  int name arguments { \
    REAL(name); \
    int saved, how = where ? hits() : 0; \
    if (!how) return real call; \
    saved = errno; \
    if (how == 2) real call; \
    errno = saved; \
    return -1; \
  }

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list more; \
    va_start(more, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more); \
    return at_below(AT_FDCWD, path) && hits() ? -1 : real(path, flags, mode); \
  }

#define OPENAT(name) \
  int name(int dir, const char *path, int flags, ...) { \
    REAL(name); \
    va_list more; \
    va_start(more, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more); \
    return at_below(dir, path) && hits() ? -1 : real(dir, path, flags, mode); \
  }

/* Half of the data comes through, or none. */
#define DATA(name, arguments, half, call) \
  ssize_t name arguments { \
    REAL(name); \
    int how = fd > 2 && fd_below(fd) ? hits() : 0; \
    if (how == 2 && size > 1) return real half; \
    return how ? -1 : real call; \
  }

#define FD(name) \
  int name(int fd) { \
    REAL(name); \
    return fd_below(fd) && hits() ? -1 : real(fd); \
  }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
DATA(read, (int fd, void *data, size_t size), (fd, data, size / 2), (fd, data, size))
DATA(write, (int fd, const void *data, size_t size), (fd, data, size / 2), (fd, data, size))
DATA(pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size / 2, at), (fd, data, size, at))
DATA(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size / 2, at), (fd, data, size, at))
FD(fsync)
FD(fdatasync)
CHANGE(symlink, (const char *to, const char *path), (to, path), at_below(AT_FDCWD, path))
CHANGE(symlinkat, (const char *to, int dir, const char *path), (to, dir, path), at_below(dir, path))
CHANGE(link, (const char *from, const char *path), (from, path), at_below(AT_FDCWD, path))
CHANGE(linkat, (int of, const char *from, int dir, const char *path, int flags), (of, from, dir, path, flags),
       at_below(dir, path))
CHANGE(rename, (const char *from, const char *path), (from, path), at_below(AT_FDCWD, path))
CHANGE(renameat, (int of, const char *from, int dir, const char *path), (of, from, dir, path), at_below(dir, path))
CHANGE(unlink, (const char *path), (path), at_below(AT_FDCWD, path))
CHANGE(mkdir, (const char *path, mode_t mode), (path, mode), at_below(AT_FDCWD, path))
