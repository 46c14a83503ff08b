/* Moves rows of memory over sockets, and digests them while they are in the cache: one call for all of a piece, so that
 * its thread needs the interpreter's lock once. kernels/stream.py says what the fields are.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "vectors.h"

#define MOST_ROWS 1024 /* IOV_MAX */

void pdkv_digest(
    uint64_t *digests, const uint64_t *seeds, const int64_t *sizes, char *target, const char *source,
    const int64_t *target_offsets, const int64_t *source_offsets, int64_t n,
    int64_t outer, int64_t target_outer_stride, int64_t source_outer_stride,
    int64_t inner, int64_t target_inner_stride, int64_t source_inner_stride, int64_t row_bytes);

typedef struct {
    int64_t fds[2], num_fds, sends, deadline_ns;
    char *base;
    const int64_t *rows; /* (num_rows, 2): offset and length */
    int64_t num_rows, num_bytes, batch_bytes, step_bytes;
    uint64_t *digests; /* NULL: none */
    const uint64_t *seeds;
    const int64_t *sizes, *offsets;
    int64_t num_units, units_per_step;
    int64_t outer, outer_stride, inner, inner_stride, row_bytes;
} stream;

static void digest_step(const stream *s, int64_t step) {
    const int64_t first = step * s->units_per_step;
    int64_t count = s->num_units - first;
    if (s->digests == NULL || count <= 0) return;
    if (count > s->units_per_step) count = s->units_per_step;
    pdkv_digest(s->digests + first * s->inner, s->seeds, s->sizes + first, NULL, s->base, NULL, s->offsets + first,
                count, s->outer, 0, s->outer_stride, s->inner, 0, s->inner_stride, s->row_bytes);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* 0, or the error's number; EPIPE where the peer has closed the connection, EAGAIN where it is late. */
int64_t pdkv_stream(const stream *s) {
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
            const int64_t moved = s->sends ? sendmsg(fd, &message, MSG_NOSIGNAL) : recvmsg(fd, &message, MSG_WAITALL);
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
