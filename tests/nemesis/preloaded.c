/* Steps the wall clock of one process, delays its reads of a file and marks its connections, when loaded with LD_PRELOAD.
 *
 * CLOCK_STEP_FILE names a file of three 64-bit numbers. The first is the step in nanoseconds; it may change at any time.
 * The step is added to what the process reads, and taken from the absolute wall times at which it asks to be woken, so
 * that waits last as long as asked. Monotonic clocks stay as they are. The second number counts the times at which the
 * process has read a wall clock with a step. The third is the delay of each preadv in nanoseconds.
 *
 * SOURCE_ADDRESS is an address in 127.0.0.0/8, from which the process then connects to all addresses in there, over
 * IPv4 and over IPv6 sockets.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static volatile struct {
    int64_t step_ns;
    int64_t num_stepped_reads;
    int64_t read_delay_ns;
} *shared;

__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("CLOCK_STEP_FILE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) shared = mapped;
}

static struct timespec later(struct timespec t, int64_t ns) {
    int64_t sum = t.tv_sec * SECOND + t.tv_nsec + ns;
    struct timespec result = {.tv_sec = sum / SECOND, .tv_nsec = sum % SECOND};
    return result;
}

static int64_t step(void) { return shared ? shared->step_ns : 0; }

/* Absolute times below 30 years are of a monotonic clock, which counts from the start of the machine. */
static struct timespec to_real(const struct timespec *t) { return t->tv_sec < SECOND ? *t : later(*t, -step()); }

int clock_gettime(clockid_t id, struct timespec *t) {
    int result = (int)syscall(SYS_clock_gettime, id, t);
    int64_t ns = step();
    if (result == 0 && ns && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        *t = later(*t, ns);
        __atomic_fetch_add(&shared->num_stepped_reads, 1, __ATOMIC_RELAXED);
    }
    return result;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict t) {
    REAL(pthread_cond_timedwait);
    struct timespec end = to_real(t);
    return real(cond, mutex, &end);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict t) {
    REAL(pthread_mutex_timedlock);
    struct timespec end = to_real(t);
    return real(mutex, &end);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict t) {
    REAL(sem_timedwait);
    struct timespec end = to_real(t);
    return real(semaphore, &end);
}

long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    struct timespec end;
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
        end = to_real((const struct timespec *)a[3]);
        a[3] = (long)&end;
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static ssize_t delayed_preadv(int fd, const struct iovec *parts, int count, int64_t offset) {
    struct timespec delay = later((struct timespec){0}, shared ? shared->read_delay_ns : 0);
    if (delay.tv_sec || delay.tv_nsec) nanosleep(&delay, NULL);
    return (ssize_t)syscall(SYS_preadv, fd, parts, count, offset, 0);
}

/* Python calls one of these. The flags are those of os.preadv, which nothing here sets. */
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return delayed_preadv(fd, parts, count, offset);
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    (void)flags;
    return delayed_preadv(fd, parts, count, offset);
}

/* Whatever fails here leaves the source address to the kernel, which the proxy at the other end reports. */
static void bind_source(int fd, const struct sockaddr *to, struct in_addr source) {
    if (to->sa_family == AF_INET) {
        if (ntohl(((const struct sockaddr_in *)to)->sin_addr.s_addr) >> 24 != 127) return;
        struct sockaddr_in from = {.sin_family = AF_INET, .sin_addr = source};
        bind(fd, (struct sockaddr *)&from, sizeof from);
    } else if (to->sa_family == AF_INET6) {
        const struct in6_addr *address = &((const struct sockaddr_in6 *)to)->sin6_addr;
        if (!IN6_IS_ADDR_V4MAPPED(address) || address->s6_addr[12] != 127) return;
        struct sockaddr_in6 from = {.sin6_family = AF_INET6, .sin6_addr = *address};
        memcpy(&from.sin6_addr.s6_addr[12], &source, sizeof source);
        bind(fd, (struct sockaddr *)&from, sizeof from);
    }
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    REAL(connect);
    const char *text = getenv("SOURCE_ADDRESS");
    struct in_addr source;
    if (text && inet_pton(AF_INET, text, &source) == 1) bind_source(fd, address, source);
    return real(fd, address, length);
}
