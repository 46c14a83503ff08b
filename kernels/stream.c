/* Moves rows of memory over sockets, and digests them while they are in the cache: one call for all of a piece, so that
 * its thread needs the interpreter's lock once. kernels/stream.py says what the fields are.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define MOST_ROWS 1024 /* IOV_MAX */

void pdkv_digest(
    uint64_t *digests, const uint64_t *seeds, const int64_t *sizes, char *target, const char *source,
    const int64_t *target_offsets, const int64_t *source_offsets, int64_t n,
    int64_t outer, int64_t target_outer_stride, int64_t source_outer_stride,
    int64_t inner, int64_t target_inner_stride, int64_t source_inner_stride, int64_t row_bytes);

typedef struct {
    int64_t fds[2], num_fds, sends, deadline_ns;
    int64_t pipe[2]; /* to read from, to write to; -1: none */
    char *base;
    const int64_t *rows; /* (num_rows, 2): offset and length */
    int64_t num_rows, num_bytes, batch_bytes, step_bytes;
    uint64_t *digests; /* NULL: none */
    const uint64_t *seeds;
    const int64_t *sizes, *offsets;
    int64_t num_units, units_per_step, slices;
    int64_t outer, outer_stride, inner, inner_stride, row_bytes;
} stream;

/* A step is some units, or so much of their outer rows: one of `slices`. */
static void digest_step(const stream *s, int64_t step) {
    if (s->digests == NULL) return;
    const int64_t first = step / s->slices * s->units_per_step, slice = step % s->slices, outer = s->outer / s->slices;
    int64_t count = s->num_units - first;
    if (count <= 0) return;
    if (count > s->units_per_step) count = s->units_per_step;
    pdkv_digest(s->digests + first * s->inner, s->seeds + slice * outer * s->inner, s->sizes + first, NULL,
                s->base + slice * outer * s->outer_stride, NULL, s->offsets + first,
                count, outer, 0, s->outer_stride, s->inner, 0, s->inner_stride, s->row_bytes);
}

/* As sendmsg, without a copy: what is sent are the pages, which the receiver reads where they lie. */
static int64_t splice_rows(const stream *s, int fd, const struct msghdr *rows) {
    const int64_t taken = vmsplice((int)s->pipe[1], rows->msg_iov, rows->msg_iovlen, SPLICE_F_NONBLOCK);
    for (int64_t left = taken; left > 0;) {
        const int64_t moved = splice((int)s->pipe[0], NULL, fd, NULL, (size_t)left, SPLICE_F_MOVE);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return moved;
        left -= moved;
    }
    return taken;
}

static int64_t move_rows(const stream *s, int fd, struct msghdr *rows) {
    if (!s->sends) return recvmsg(fd, rows, MSG_WAITALL);
    return s->pipe[1] < 0 ? sendmsg(fd, rows, MSG_NOSIGNAL) : splice_rows(s, fd, rows);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* 0, or the error's number; EPIPE where the peer has closed the connection, EAGAIN where it is late. */
int64_t pdkv_stream_rows(const stream *s) {
    struct iovec window[MOST_ROWS];
    struct msghdr message = {.msg_iov = window};
    int64_t row = 0, begun = 0, done = 0; /* `begun` bytes of `row` */
    for (int64_t step = 0; done < s->num_bytes; step++) {
        const int64_t end = done + s->step_bytes < s->num_bytes ? done + s->step_bytes : s->num_bytes;
        const int fd = (int)s->fds[done / s->batch_bytes % s->num_fds];
        if (s->sends) digest_step(s, step);
        while (done < end) {
            int64_t wanted = 0, r = row, at = begun;
            for (message.msg_iovlen = 0; message.msg_iovlen < MOST_ROWS && done + wanted < end && r < s->num_rows;) {
                const int64_t left = s->rows[2 * r + 1] - at, most = end - done - wanted;
                const int64_t length = left < most ? left : most;
                window[message.msg_iovlen++] = (struct iovec){s->base + s->rows[2 * r] + at, (size_t)length};
                wanted += length;
                r++, at = 0;
            }
            const int64_t moved = move_rows(s, fd, &message);
            if (moved < 0 && errno == EINTR) continue;
            if (moved <= 0) return moved < 0 ? errno : EPIPE;
            done += moved;
            for (int64_t left = moved; left > 0;) {
                const int64_t rest = s->rows[2 * row + 1] - begun;
                if (left < rest) begun += left;
                else row++, begun = 0;
                left -= rest;
            }
            if (done < s->num_bytes && now_ns() >= s->deadline_ns) return EAGAIN;
        }
        if (!s->sends) digest_step(s, step);
    }
    return 0;
}
