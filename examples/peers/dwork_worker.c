/* A plain dwork worker in C. It prints the name of each task in capitals.

       cc -o dwork_worker dwork_worker.c -lzmq
       ./dwork_worker tcp://127.0.0.1:6125 [KEYFILE]

   The protocol is docs/dialects/dwork.md. The few protobuf bytes are written by hand. */

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

enum { STEAL = 1, COMPLETE = 2, TRANSFER = 3, NOT_FOUND = 5, OK = 6, EXIT = 7 };
enum { REPLY_MS_MAX = 3000, PAUSE_US = 200000 };

static void *context, *peer;
static const char *endpoint;
static char location[160], secret[41], public[41], broker[41];

/* Read a key file: a line of it is NAME = "VALUE". */
static void read_key(const char *path) {
    char line[256], name[65];
    FILE *file = fopen(path, "r");
    if (file == NULL) { perror(path); exit(2); }
    while (fgets(line, sizeof line, file) != NULL) {
        sscanf(line, "secret = \"%40[^\"]\"", secret);
        sscanf(line, "broker = \"%40[^\"]\"", broker);
        /* The key of a worker is valid for its own name, and for names below it. */
        if (sscanf(line, "name = \"%64[^\"]\"", name) == 1)
            snprintf(location, sizeof location, "%s/%d", name, getpid());
    }
    fclose(file);
    if (zmq_curve_public(public, secret) != 0) { fprintf(stderr, "%s: no key\n", path); exit(2); }
}

static void connect_peer(void) {
    int linger = 0, timeout = REPLY_MS_MAX;
    if (peer != NULL) zmq_close(peer);
    peer = zmq_socket(context, ZMQ_REQ);
    zmq_setsockopt(peer, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(peer, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
    if (*broker) {
        zmq_setsockopt(peer, ZMQ_CURVE_SERVERKEY, broker, 40);
        zmq_setsockopt(peer, ZMQ_CURVE_SECRETKEY, secret, 40);
        zmq_setsockopt(peer, ZMQ_CURVE_PUBLICKEY, public, 40);
    }
    if (zmq_connect(peer, endpoint) != 0) { perror(endpoint); exit(2); }
}

/* A number of protobuf has seven bits in each byte, the lowest first. The last byte is below 128. */
static size_t read_number(const unsigned char **at, const unsigned char *end) {
    size_t number = 0;
    for (int shift = 0; *at < end && shift < 63; shift += 7) {
        number |= (size_t)(**at & 127) << shift;
        if (*(*at)++ < 128) break;
    }
    return number;
}

/* Find the next field. Return its tag, 0 at the end. A field of bytes is from *body to *at. */
static size_t next_field(const unsigned char **at, const unsigned char *end,
                         const unsigned char **body) {
    if (*at >= end) return 0;
    size_t tag = read_number(at, end), size = read_number(at, end);
    *body = *at;
    if ((tag & 7) == 2) *at = size <= (size_t)(end - *at) ? *at + size : end;
    return tag;
}

/* Send a request with the tasks of an earlier reply, and return the type of its reply. 0: none. */
static int ask(int type, const unsigned char *tasks, size_t tasks_size, zmq_msg_t *reply) {
    unsigned char *request = malloc(tasks_size + 4 + sizeof location), *end = request;
    *end++ = 0x08, *end++ = (unsigned char)type;            /* field 1: the type */
    if (tasks_size) memcpy(end, tasks, tasks_size);         /* field 2: tasks */
    end += tasks_size;
    *end++ = 0x32, *end++ = (unsigned char)strlen(location); /* field 6: the location */
    memcpy(end, location, strlen(location)), end += strlen(location);
    zmq_send(peer, request, (size_t)(end - request), 0);
    free(request);
    if (zmq_msg_recv(reply, peer, 0) < 2) return 0;
    return ((unsigned char *)zmq_msg_data(reply))[1];
}

/* Print the names of the tasks, in capitals. Here a worker would run them. */
static void work(const unsigned char *at, const unsigned char *end) {
    const unsigned char *task, *name;
    while (next_field(&at, end, &task) == 0x12)
        while (task < at)
            if (next_field(&task, at, &name) == 0x0a) {
                while (name < task) putchar(toupper(*name++));
                putchar('\n');
            }
    fflush(stdout);
}

int main(int count, char **words) {
    if (count < 2) { fprintf(stderr, "usage: %s ENDPOINT [KEYFILE]\n", words[0]); return 2; }
    context = zmq_ctx_new(), endpoint = words[1];
    snprintf(location, sizeof location, "c-%d", getpid());
    if (count > 2) read_key(words[2]);
    zmq_msg_t reply;
    zmq_msg_init(&reply);
    int type = 0;
    while (type != EXIT) {
        if (type == 0) { /* The start, or a lost reply. The tasks of this location are returned. */
            if (peer != NULL) fprintf(stderr, "no reply: no broker, or not this key\n");
            connect_peer();
            type = ask(EXIT, NULL, 0, &reply) ? OK : 0;
        } else if ((type = ask(STEAL, NULL, 0, &reply)) == TRANSFER) {
            /* All after the type are tasks. They are sent back as they are. */
            size_t size = zmq_msg_size(&reply) - 2;
            unsigned char *tasks = memcpy(malloc(size), (char *)zmq_msg_data(&reply) + 2, size);
            work(tasks, tasks + size);
            type = ask(COMPLETE, tasks, size, &reply) ? OK : 0;
            free(tasks);
        } else if (type == NOT_FOUND) {
            usleep(PAUSE_US);
        } else if (type != EXIT && type != 0) {
            fprintf(stderr, "the broker replied with type %d\n", type); /* Error: a wrong role? */
            return 1;
        }
    }
    return 0;
}
