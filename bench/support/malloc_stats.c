/* Preloaded library: a thread writes the process's glibc malloc statistics to a file at a fixed interval.
 *
 * MALLOC_STATS_DIR: directory of the files, one per process, named by process id.
 * MALLOC_STATS_INTERVAL_S: whole seconds between two lines.
 * A line has the monotonic time in seconds, and in bytes over all arenas: taken from the system, mapped blocks,
 * allocated, free. The thread itself allocates nothing after its start.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static void *write_statistics(void *unused)
{
    const char *directory = getenv("MALLOC_STATS_DIR");
    const char *interval = getenv("MALLOC_STATS_INTERVAL_S");
    char path[512], line[256];
    struct timespec pause = {interval ? atoi(interval) : 30, 0};
    (void)unused;
    snprintf(path, sizeof path, "%s/%d", directory, (int)getpid());
    for (;;) {
        struct timespec now;
        struct mallinfo2 info = mallinfo2();
        int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (file >= 0) {
            int length = snprintf(line, sizeof line, "%ld %zu %zu %zu %zu\n", (long)now.tv_sec, info.arena,
                                  info.hblkhd, info.uordblks, info.fordblks);
            ssize_t written = write(file, line, (size_t)length);
            (void)written; /* an incomplete line is skipped by the reader */
            close(file);
        }
        nanosleep(&pause, NULL);
    }
    return NULL;
}

__attribute__((constructor)) static void start(void)
{
    pthread_t thread;
    if (getenv("MALLOC_STATS_DIR") && pthread_create(&thread, NULL, write_statistics, NULL) == 0)
        pthread_detach(thread);
}
