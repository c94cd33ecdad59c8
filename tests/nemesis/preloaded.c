/* Steps the wall clock of one process and marks its connections, when loaded with LD_PRELOAD.
 *
 * CLOCK_STEP_FILE names a file that holds the step as a 64-bit number of nanoseconds; it may change at any time. The
 * step is added to what the process reads, and taken from the absolute wall times at which it asks to be woken, so that
 * waits last as long as asked. Monotonic clocks stay as they are.
 *
 * SOURCE_ADDRESS is an address in 127.0.0.0/8, from which the process then connects to all addresses in there.
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
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static volatile int64_t *step_ns;

__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("CLOCK_STEP_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *step_ns, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) step_ns = mapped;
}

static struct timespec later(struct timespec t, int64_t ns) {
    int64_t sum = t.tv_sec * SECOND + t.tv_nsec + ns;
    struct timespec result = {.tv_sec = sum / SECOND, .tv_nsec = sum % SECOND};
    return result;
}

static int64_t step(void) { return step_ns ? *step_ns : 0; }

/* Absolute times below 30 years are of a monotonic clock, which counts from the start of the machine. */
static struct timespec to_real(const struct timespec *t) { return t->tv_sec < SECOND ? *t : later(*t, -step()); }

int clock_gettime(clockid_t id, struct timespec *t) {
    int result = (int)syscall(SYS_clock_gettime, id, t);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) *t = later(*t, step());
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

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    REAL(connect);
    const struct sockaddr_in *to = (const struct sockaddr_in *)address;
    const char *source = getenv("SOURCE_ADDRESS");
    if (source && address->sa_family == AF_INET && (ntohl(to->sin_addr.s_addr) >> 24) == 127) {
        struct sockaddr_in from = {.sin_family = AF_INET};
        if (inet_pton(AF_INET, source, &from.sin_addr) == 1) bind(fd, (struct sockaddr *)&from, sizeof from);
    }
    return real(fd, address, length);
}
