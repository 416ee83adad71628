/* The floor under any daemon's round trip: a blocking echo over a Unix socket, and its client.
 *
 *   echo serve PATH REPLY_BYTES                       one connection after the other, for ever
 *   echo ping PATH REQUEST_BYTES COUNT                u64 nanoseconds of each call on stdout
 *
 * A frame begins with 16 bytes, of which the first four are the length of the rest. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { HEADER = 16, BUFFER = 16 << 20 };

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int receive(int fd, char *buffer) {
    size_t got = 0, want = HEADER;
    while (got < want) {
        ssize_t n = read(fd, buffer + got, BUFFER - got);
        if (n <= 0) return 0;
        got += (size_t)n;
        if (got >= HEADER) {
            uint32_t rest;
            memcpy(&rest, buffer, 4);
            want = HEADER + rest;
        }
    }
    return 1;
}

static int transmit(int fd, const char *buffer, size_t size) {
    while (size) {
        ssize_t n = write(fd, buffer, size);
        if (n <= 0) return 0;
        buffer += n;
        size -= (size_t)n;
    }
    return 1;
}

static char *frame(size_t size) {
    char *made = calloc(1, size);
    uint32_t rest = (uint32_t)(size - HEADER);
    memcpy(made, &rest, 4);
    return made;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int main(int argc, char **argv) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (argc < 4 || strlen(argv[2]) >= sizeof address.sun_path) return 2;
    strcpy(address.sun_path, argv[2]);
    char *buffer = malloc(BUFFER);
    size_t size = strtoul(argv[3], 0, 10);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (!strcmp(argv[1], "serve")) {
        if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 8)) fail(argv[2]);
        char *reply = frame(size);
        for (;;) {
            int peer = accept(fd, 0, 0);
            while (receive(peer, buffer) && transmit(peer, reply, size)) {}
            close(peer);
        }
    }
    if (argc < 5) return 2;
    size_t count = strtoul(argv[4], 0, 10);
    uint64_t *spent = calloc(count, sizeof *spent);
    char *request = frame(size);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) fail(argv[2]);
    for (size_t i = 0; i < count; i++) {
        uint64_t began = now_ns();
        if (!transmit(fd, request, size) || !receive(fd, buffer)) fail("echo");
        spent[i] = now_ns() - began;
    }
    fwrite(spent, sizeof *spent, count, stdout);
    return 0;
}
