/* The floor under attaching to an arena: map a file that has its memory, and every page of it.
 *
 *   populate FILE BYTES        u64 nanoseconds of mmap and MADV_POPULATE_WRITE on stdout */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    size_t size = strtoull(argv[2], 0, 10);
    int fd = open(argv[1], O_RDWR);
    if (fd < 0) {
        perror(argv[1]);
        return 1;
    }
    uint64_t began = now_ns();
    void *mapped = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED || madvise(mapped, size, MADV_POPULATE_WRITE)) {
        perror("populate");
        return 1;
    }
    uint64_t spent = now_ns() - began;
    fwrite(&spent, sizeof spent, 1, stdout);
    return 0;
}
