/* Maps a part of a file and populates it, as a worker in C would: the ceiling of an attach.
 *
 * populate FILE OFFSET BYTES: prints the nanoseconds of mmap and MADV_POPULATE_WRITE.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: populate FILE OFFSET BYTES\n");
        return 2;
    }
    int fd = open(argv[1], O_RDWR | O_CLOEXEC);
    off_t offset = strtoll(argv[2], NULL, 10);
    size_t bytes = strtoull(argv[3], NULL, 10);
    if (fd < 0) {
        perror(argv[1]);
        return 1;
    }
    int64_t start = now_ns();
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
    if (mapped == MAP_FAILED || madvise(mapped, bytes, MADV_POPULATE_WRITE)) {
        perror("populate");
        return 1;
    }
    printf("%lld\n", (long long)(now_ns() - start));
    return 0;
}
