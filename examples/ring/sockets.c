#include "sockets.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_BEGUN = 4 };

typedef struct transfer {
    const char *send;
    char       *recv;
    size_t      send_bytes, recv_bytes;
} transfer;

struct ring_sockets {
    int             to_next, from_previous, timeout_ms;
    transfer        begun[MAX_BEGUN]; /* in a circle: from `done` to `count` */
    unsigned        count, done;
    int             failure; /* errno of the first transfer that failed; no other is tried */
    bool            closing;
    pthread_t       worker;
    pthread_mutex_t lock;
    pthread_cond_t  changed;
};

/* As much as goes without waiting. 0, or errno. */
static int send_some(int to, transfer *t)
{
    ssize_t n = send(to, t->send, t->send_bytes, MSG_NOSIGNAL);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : errno;
    t->send += n;
    t->send_bytes -= (size_t)n;
    return 0;
}

static int recv_some(int from, transfer *t)
{
    ssize_t n = recv(from, t->recv, t->recv_bytes, 0);
    if (n == 0)
        return ECONNRESET; /* the rank before has gone */
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : errno;
    t->recv += n;
    t->recv_bytes -= (size_t)n;
    return 0;
}

/* Both directions at once: if all ranks only sent first, all would wait. */
static int run_transfer(const ring_sockets *s, transfer t)
{
    while (t.send_bytes > 0 || t.recv_bytes > 0) {
        struct pollfd ends[2] = {{.fd = t.send_bytes > 0 ? s->to_next : -1, .events = POLLOUT},
                                 {.fd = t.recv_bytes > 0 ? s->from_previous : -1, .events = POLLIN}};
        int           ready = poll(ends, 2, s->timeout_ms), failed = 0;
        if (ready == 0)
            return ETIMEDOUT;
        if (ready < 0 && errno != EINTR)
            return errno;
        if (ready > 0 && ends[0].revents)
            failed = send_some(s->to_next, &t);
        if (ready > 0 && ends[1].revents && !failed)
            failed = recv_some(s->from_previous, &t);
        if (failed)
            return failed;
    }
    return 0;
}

static void *work(void *argument)
{
    ring_sockets *s = argument;
    pthread_mutex_lock(&s->lock);
    while (!s->closing || s->done != s->count) {
        if (s->done == s->count) {
            pthread_cond_wait(&s->changed, &s->lock);
            continue;
        }
        transfer next   = s->begun[s->done % MAX_BEGUN];
        int      failed = s->failure;
        pthread_mutex_unlock(&s->lock);
        if (!failed && (failed = run_transfer(s, next)) != 0)
            ring_sockets_hang_up(s); /* the neighbours need not wait */
        pthread_mutex_lock(&s->lock);
        s->failure = failed;
        s->done++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static int begin(void *user, const void *send, size_t send_bytes, void *recv, size_t recv_bytes, void *stream)
{
    ring_sockets *s = user;
    (void)stream;
    pthread_mutex_lock(&s->lock);
    while (s->count - s->done == MAX_BEGUN)
        pthread_cond_wait(&s->changed, &s->lock);
    s->begun[s->count++ % MAX_BEGUN] = (transfer){send, recv, send_bytes, recv_bytes};
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

static int wait_for_all(void *user, void *stream)
{
    ring_sockets *s = user;
    (void)stream;
    pthread_mutex_lock(&s->lock);
    while (s->done != s->count)
        pthread_cond_wait(&s->changed, &s->lock);
    int failed = s->failure;
    pthread_mutex_unlock(&s->lock);
    return failed;
}

static int exchange_host(void *user, const void *send, void *recv, size_t bytes)
{
    begin(user, send, bytes, recv, bytes, NULL);
    return wait_for_all(user, NULL);
}

ring_sockets *ring_sockets_open(int to_next, int from_previous, int timeout_ms)
{
    ring_sockets *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->to_next       = to_next;
    s->from_previous = from_previous;
    s->timeout_ms    = timeout_ms;
    fcntl(to_next, F_SETFL, fcntl(to_next, F_GETFL) | O_NONBLOCK);
    fcntl(from_previous, F_SETFL, fcntl(from_previous, F_GETFL) | O_NONBLOCK);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (pthread_create(&s->worker, NULL, work, s) == 0)
        return s;
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
    return NULL;
}

void ring_sockets_hang_up(ring_sockets *s)
{
    shutdown(s->to_next, SHUT_RDWR);
    shutdown(s->from_previous, SHUT_RDWR);
}

void ring_sockets_close(ring_sockets *s)
{
    if (!s)
        return;
    ring_sockets_hang_up(s);
    pthread_mutex_lock(&s->lock);
    s->closing = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->worker, NULL);
    close(s->to_next);
    close(s->from_previous);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

flash_attn_transport ring_sockets_transport(ring_sockets *s)
{
    return (flash_attn_transport){.begin = begin, .wait = wait_for_all, .exchange_host = exchange_host, .user = s};
}

bool ring_sockets_pairs(int ranks, int *to_next, int *from_previous)
{
    for (int rank = 0; rank < ranks; rank++) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) {
            for (int made = 0; made < rank; made++) {
                close(to_next[made]);
                close(from_previous[(made + 1) % ranks]);
            }
            return false;
        }
        to_next[rank]                     = ends[0];
        from_previous[(rank + 1) % ranks] = ends[1];
    }
    return true;
}
