/* The ceiling of the disk tier's reads: whole slots of a file at given offsets, by io_uring.
 *
 *     ring_read FILE BYTES DEPTH < offsets    (64-bit, in the machine's byte order)
 *
 * Reads BYTES at each offset, past the page cache, DEPTH at a time, and prints the seconds. The
 * memory that is read into is there before the clock starts. System calls only: no library. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { OFFSETS_MAX = 1 << 20 };

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void *map(int fd, size_t size, off_t offset) {
    int flags = MAP_SHARED | MAP_POPULATE | (fd < 0 ? MAP_ANONYMOUS : 0);
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, offset);
    if (memory == MAP_FAILED) fail("mmap");
    return memory;
}

int main(int count_arguments, char **arguments) {
    if (count_arguments != 4) return 2;
    size_t bytes = strtoul(arguments[2], NULL, 10);
    unsigned depth = strtoul(arguments[3], NULL, 10);
    int file = open(arguments[1], O_RDONLY | O_DIRECT);
    if (file < 0) fail(arguments[1]);
    uint64_t *offsets = malloc(OFFSETS_MAX * sizeof *offsets);
    size_t count = fread(offsets, sizeof *offsets, OFFSETS_MAX, stdin);
    char *memory = map(-1, count * bytes, 0);

    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    int ring = syscall(__NR_io_uring_setup, depth, &params);
    if (ring < 0) fail("io_uring_setup");
    size_t submissions_end = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t completions_end = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    char *shared = map(ring, submissions_end > completions_end ? submissions_end : completions_end,
                       IORING_OFF_SQ_RING);
    struct io_uring_sqe *submissions =
        map(ring, params.sq_entries * sizeof *submissions, IORING_OFF_SQES);
    struct io_uring_cqe *completions = (void *)(shared + params.cq_off.cqes);
    unsigned *tail = (void *)(shared + params.sq_off.tail);
    unsigned *array = (void *)(shared + params.sq_off.array);
    unsigned *done_head = (void *)(shared + params.cq_off.head);
    unsigned *done_tail = (void *)(shared + params.cq_off.tail);

    double began = now();
    size_t following = 0, done = 0;
    while (done < count) {
        unsigned at = *tail, added = 0;
        for (; following < count && following - done < depth; following++, added++, at++) {
            unsigned place = at & (params.sq_entries - 1);
            struct io_uring_sqe *one = &submissions[place];
            memset(one, 0, sizeof *one);
            one->opcode = IORING_OP_READ;
            one->fd = file;
            one->off = offsets[following];
            one->addr = (uintptr_t)(memory + following * bytes);
            one->len = bytes;
            array[place] = place;
        }
        __atomic_store_n(tail, at, __ATOMIC_RELEASE);
        if (syscall(__NR_io_uring_enter, ring, added, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
            fail("io_uring_enter");
        unsigned head = *done_head, end = __atomic_load_n(done_tail, __ATOMIC_ACQUIRE);
        for (; head != end; head++, done++) {
            struct io_uring_cqe *one = &completions[head & (params.cq_entries - 1)];
            if (one->res != (int)bytes) {
                fprintf(stderr, "a read of %zu bytes returned %d\n", bytes, one->res);
                return 1;
            }
        }
        __atomic_store_n(done_head, head, __ATOMIC_RELEASE);
    }
    printf("%.9f\n", now() - began);
    return 0;
}
