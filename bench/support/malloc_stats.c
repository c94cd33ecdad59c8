/* Preloaded library: a thread writes the process's glibc malloc statistics to a file at a fixed interval.
 *
 * MALLOC_STATS_DIR: directory of the files, one per process, named by process id.
 * MALLOC_STATS_INTERVAL_S: whole seconds between two lines.
 * A line has the monotonic time in seconds, and in bytes over all arenas: taken from the system, mapped blocks,
 * allocated, free. The thread allocates nothing itself.
 */
#define _GNU_SOURCE
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
        FILE *file;
        clock_gettime(CLOCK_MONOTONIC, &now);
        file = fopen(path, "ae");
        if (file) {
            snprintf(line, sizeof line, "%ld %zu %zu %zu %zu\n", (long)now.tv_sec, info.arena, info.hblkhd,
                     info.uordblks, info.fordblks);
            fputs(line, file);
            fclose(file);
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
