/* The planner's innermost loops, compiled: seconds of one 1F1B pipeline, of 1F1B pipelines that
   share paths, of any schedule for many divisions of the layers, and of chains of stages; the
   cheapest sequences of blocks; the division of the layers among stages; and exchanges that share
   paths.

   Each function does the same additions and comparisons in the same order as the Python that stands
   beside its caller (`cost.pipeline.stage_ends_s`, `cost.sync.exchange_clock`,
   `schedule.simulator.engine`, `schedule.simulator.relaxed`, `bounds.chains.rests`,
   `planner.columns.bundle_paths`, `planner.division.layers`, `planner.completion.filled`, `planner.evaluate.tail`), so the results
   are equal to the bit; tests hold them equal.  Where this file is not compiled, the Python
   runs. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030C0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- arguments ---------------------------------------------------------------------------- */

/* Copy a list or tuple of `count` numbers; return 0 with an exception set where it is another. */
static int read_doubles(PyObject *given, Py_ssize_t count, double *into)
{
    if (PySequence_Size(given) != count) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "the lists of a pipeline have unlike lengths");
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(given, i);
        if (item == NULL)
            return 0;
        into[i] = PyFloat_AsDouble(item);
        Py_DECREF(item);
        if (into[i] == -1.0 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static int read_longs(PyObject *given, Py_ssize_t count, long *into)
{
    if (PySequence_Size(given) != count) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "the lists of a pipeline have unlike lengths");
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(given, i);
        if (item == NULL)
            return 0;
        into[i] = PyLong_AsLong(item);
        Py_DECREF(item);
        if (into[i] == -1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static PyObject *tuple_of(const double *values, Py_ssize_t count)
{
    PyObject *made = PyTuple_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]);
        if (value == NULL || PyTuple_SetItem(made, i, value) < 0)
            Py_CLEAR(made);
    }
    return made;
}

/* ---- one pipeline: the recurrence of 1F1B --------------------------------------------------- */

typedef struct {
    long n, m;              /* stages, micro-batches */
    double *free_at;        /* [n], when a stage has computed */
    double *forward_link;   /* [n - 1], when a hop is free */
    double *backward_link;  /* [n - 1] */
    double *gradients;      /* [n - 1][m], arrivals in order; */
    long *taken, *arrived;  /* [n - 1], those taken and those arrived */
    double *before;         /* a state, flat, and its size */
    long size, capacity;
    long round, length;
    int has_before;
} Recurrence;

static void remember(Recurrence *r, long k)
{
    long n = r->n, at = 0;
    memcpy(r->before, r->free_at, n * sizeof(double)), at += n;
    memcpy(r->before + at, r->forward_link, (n - 1) * sizeof(double)), at += n - 1;
    memcpy(r->before + at, r->backward_link, (n - 1) * sizeof(double)), at += n - 1;
    for (long i = 0; i < n - 1; i++)
        for (long q = r->taken[i]; q < r->arrived[i]; q++)
            r->before[at++] = r->gradients[i * r->m + q];
    r->size = at;
    r->round = k;
    r->has_before = 1;
}

static double absolute(double x) { return x < 0 ? -x : x; }

static int has_shifted(const Recurrence *r, double shift)
{
    long n = r->n, at = 0;
    const double within = 1e-13 * r->free_at[0];
    const double *lines[3] = {r->free_at, r->forward_link, r->backward_link};
    if (absolute(r->free_at[n - 1] - r->before[n - 1] - shift) > within) /* mostly enough */
        return 0;
    for (int line = 0; line < 3; line++)
        for (long i = 0; i < (line ? n - 1 : n); i++)
            if (!(absolute(lines[line][i] - r->before[at++] - shift) <= within))
                return 0;
    for (long i = 0; i < n - 1; i++)
        for (long q = r->taken[i]; q < r->arrived[i]; q++)
            if (!(absolute(r->gradients[i * r->m + q] - r->before[at++] - shift) <= within))
                return 0;
    return at == r->size;
}

/* `cost.pipeline._Steady.skip`: pass over rounds that repeat; return their number. */
static long skip(Recurrence *r, long k, long rounds_left)
{
    long n = r->n;
    if (!r->has_before) {
        remember(r, k);
        return 0;
    }
    long length = k - r->round;
    double shift = r->free_at[0] - r->before[0];
    if (has_shifted(r, shift)) {
        long times = rounds_left / length;
        double further = (double)times * shift;
        for (long i = 0; i < n; i++)
            r->free_at[i] = r->free_at[i] + further;
        for (long i = 0; i < n - 1; i++) {
            r->forward_link[i] = r->forward_link[i] + further;
            r->backward_link[i] = r->backward_link[i] + further;
            for (long q = r->taken[i]; q < r->arrived[i]; q++)
                r->gradients[i * r->m + q] += further;
        }
        remember(r, k);
        return times * length;
    }
    if (length >= r->length) {
        r->length *= 2;
        remember(r, k);
    }
    return 0;
}

static void run_rounds(Recurrence *r, const long *counts, const double *forward,
                       const double *backward, const double *forward_busy,
                       const double *forward_latency, const double *backward_busy,
                       const double *backward_latency)
{
    long n = r->n, m = r->m, last = n - 1;
    long rounds = m + counts[0] - 1;
    for (long k = 0; k < rounds; k++) {
        if (k < m) {
            double arrival = 0.0;
            for (long i = 0; i < n; i++) {
                double free = r->free_at[i];
                double end = (free > arrival ? free : arrival) + forward[i];
                r->free_at[i] = end;
                if (i < last) {
                    double link = r->forward_link[i];
                    link = (link > end ? link : end) + forward_busy[i];
                    r->forward_link[i] = link;
                    arrival = link + forward_latency[i];
                }
            }
        }
        for (long i = last; i >= 0; i--) {
            long micro_batch = k - counts[i] + 1;
            if (micro_batch < 0)
                break;
            if (micro_batch >= m)
                continue;
            double ready = i < last ? r->gradients[i * m + r->taken[i]++] : 0.0;
            double free = r->free_at[i];
            double end = (free > ready ? free : ready) + backward[i];
            r->free_at[i] = end;
            if (i) {
                double link = r->backward_link[i - 1];
                link = (link > end ? link : end) + backward_busy[i - 1];
                r->backward_link[i - 1] = link;
                r->gradients[(i - 1) * m + r->arrived[i - 1]++] = link + backward_latency[i - 1];
            }
        }
        if (counts[0] - 1 <= k && k < m)
            k += skip(r, k, m - 1 - k);
    }
}

PyDoc_STRVAR(stage_ends_doc,
"stage_ends(forward_s, backward_s, forward_busy_s, forward_latency_s, backward_busy_s,\n"
"           backward_latency_s, num_micro_batches, launch_counts)\n\n"
"Return when each stage's last backward pass ends, for two stages or more.");

static PyObject *stage_ends(PyObject *self, PyObject *args)
{
    PyObject *lists[6], *given_counts, *found = NULL;
    long m;
    if (!PyArg_ParseTuple(args, "OOOOOOlO", &lists[0], &lists[1], &lists[2], &lists[3], &lists[4],
                          &lists[5], &m, &given_counts))
        return NULL;
    Py_ssize_t n = PySequence_Size(lists[0]);
    if (n < 0)
        return NULL;
    if (n < 2 || m < 1) {
        PyErr_SetString(PyExc_ValueError, "two stages and one micro-batch at least");
        return NULL;
    }
    /* In order: six lists of seconds, the state, the gradients, a state to compare with. */
    size_t queue = (size_t)(n - 1) * (size_t)m;
    size_t room = (size_t)(2 * n + 4 * (n - 1)) + (size_t)(3 * n - 2) + 2 * queue + (size_t)(3 * n);
    double *space = calloc(room, sizeof(double));
    long *whole = calloc((size_t)(3 * n), sizeof(long));
    if (space == NULL || whole == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    double *at = space, *values[6];
    for (int i = 0; i < 6; i++) {
        Py_ssize_t count = i < 2 ? n : n - 1;
        values[i] = at;
        if (!read_doubles(lists[i], count, at))
            goto done;
        at += count;
    }
    if (!read_longs(given_counts, n, whole))
        goto done;
    for (Py_ssize_t i = 0; i < n; i++)
        if (whole[i] < 1 || whole[i] > m || (i && whole[i] > whole[i - 1])) {
            PyErr_SetString(PyExc_ValueError, "launch counts from 1 to all, falling");
            goto done;
        }
    Recurrence r = {.n = (long)n, .m = m, .length = 1, .round = whole[0] - 1};
    r.free_at = at, at += n;
    r.forward_link = at, at += n - 1;
    r.backward_link = at, at += n - 1;
    r.gradients = at, at += queue;
    r.before = at;
    r.taken = whole + n;
    r.arrived = whole + 2 * n;
    run_rounds(&r, whole, values[0], values[1], values[2], values[3], values[4], values[5]);
    found = tuple_of(r.free_at, n);
done:
    free(space);
    free(whole);
    return found;
}

/* ---- pipelines that share paths: events in order of time ------------------------------------ */

typedef struct {
    int32_t path;
    double seconds;
} Hop;

typedef struct {
    Hop *hops;
    long num_hops;
    double latency;
} Crossing;

typedef struct {
    long n, m;
    int waits;             /* a sender waits until its receiver has the message */
    long *counts;          /* [n] */
    double *seconds;       /* [n][2], forward and backward */
    Crossing *crossings;   /* [n - 1][2], backward and forward */
    long first_stage;      /* place of stage 0 among the stages of all pipelines */
    double *arrival;       /* [2 (n - 1)][m], when a message is usable; negative: not posted */
    double *asked;         /* the same, when its receiver came to it; negative: not yet */
    int32_t *waiting;      /* the stage that waits for a message to come, or -1 */
    int32_t *asking;       /* the stage that waits for a message to be taken, or -1 */
} Pipe;

/* A stage runs passes in turn; before a pass it may post a send together with a receive. */
typedef struct {
    int32_t pipe, stage;
    long next;             /* the pass that comes next, 0 .. 2 m */
    int posted, blocked;
    long send, receive;    /* keys of the messages of the present instruction, or -1 */
    int has_messages;      /* the present instruction is messages, else the pass `next` */
    double now, computed;
    double sent_until;
} Stage;

typedef struct {
    double time;
    long number;
    int32_t stage;
} Event;

typedef struct {
    Pipe *pipes;
    Stage *stages;
    double *path_free;
    Event *heap;
    long size, num_queued;
    int32_t *ready;
    long num_ready;
} Engine;

static int before(const Event *a, const Event *b)
{
    return a->time < b->time || (a->time == b->time && a->number < b->number);
}

static void push(Engine *e, double time, int32_t stage)
{
    Event made = {time, ++e->num_queued, stage};
    long i = e->size++;
    while (i && before(&made, &e->heap[(i - 1) / 2])) {
        e->heap[i] = e->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    e->heap[i] = made;
}

static Event pop(Engine *e)
{
    Event first = e->heap[0], moved = e->heap[--e->size];
    long i = 0;
    for (;;) {
        long child = 2 * i + 1;
        if (child >= e->size)
            break;
        if (child + 1 < e->size && before(&e->heap[child + 1], &e->heap[child]))
            child++;
        if (!before(&e->heap[child], &moved))
            break;
        e->heap[i] = e->heap[child];
        i = child;
    }
    e->heap[i] = moved;
    return first;
}

/* Pass `number` of a stage: whether it is a forward pass, and its micro-batch
   (`orders.one_f_one_b.stage_order`). */
static int pass_of(const Pipe *p, int32_t stage, long number, long *micro_batch)
{
    long ahead = p->counts[stage] - 1;
    if (ahead > p->m)
        ahead = p->m;
    if (number < ahead) {
        *micro_batch = number;
        return 1;
    }
    long k = number - ahead;
    if (k >= 2 * (p->m - ahead)) {
        *micro_batch = number - p->m;
        return 0;
    }
    *micro_batch = k % 2 ? k / 2 : ahead + k / 2;
    return k % 2 == 0;
}

static long key_of(const Pipe *p, long boundary, int is_forward, long micro_batch)
{
    return (2 * boundary + is_forward) * p->m + micro_batch;
}

/* Set the stage's present instruction to what comes after pass `next - 1`: its send, the receive of
   pass `next`, both where they cross the same boundary (`programme.build_schedule`), or the pass. */
static void after_pass(const Engine *e, Stage *s)
{
    const Pipe *p = &e->pipes[s->pipe];
    long micro_batch, last = p->n - 1, sent_over = -1;
    s->send = s->receive = -1;
    if (s->next) {
        int was_forward = pass_of(p, s->stage, s->next - 1, &micro_batch);
        long boundary = was_forward ? s->stage : s->stage - 1;
        if (boundary >= 0 && boundary < last) {
            s->send = key_of(p, boundary, was_forward, micro_batch);
            sent_over = boundary;
        }
    }
    if (s->next < 2 * p->m) {
        int is_forward = pass_of(p, s->stage, s->next, &micro_batch);
        long boundary = is_forward ? s->stage - 1 : s->stage;
        if (boundary >= 0 && boundary < last && (sent_over < 0 || sent_over == boundary))
            s->receive = key_of(p, boundary, is_forward, micro_batch);
    }
    s->has_messages = s->send >= 0 || s->receive >= 0;
}

/* Go on behind messages: to a receive that stands alone, or to the pass. */
static void after_messages(const Engine *e, Stage *s)
{
    const Pipe *p = &e->pipes[s->pipe];
    long micro_batch, last = p->n - 1;
    int sent_alone = s->send >= 0 && s->receive < 0;
    s->send = s->receive = -1;
    s->has_messages = 0;
    if (sent_alone && s->next < 2 * p->m) {
        int is_forward = pass_of(p, s->stage, s->next, &micro_batch);
        long boundary = is_forward ? s->stage - 1 : s->stage;
        if (boundary >= 0 && boundary < last) {
            s->receive = key_of(p, boundary, is_forward, micro_batch);
            s->has_messages = 1;
        }
    }
}

static void wake(Engine *e, int32_t *slot)
{
    int32_t stage = *slot;
    *slot = -1;
    if (stage >= 0 && e->stages[stage].blocked) {
        e->stages[stage].blocked = 0;
        e->ready[e->num_ready++] = stage;
    }
}

static void ask(Engine *e, Pipe *p, long key, double now)
{
    p->asked[key] = now;
    wake(e, &p->asking[key]);
}

static void advance(Engine *e, int32_t which)
{
    Stage *s = &e->stages[which];
    Pipe *p = &e->pipes[s->pipe];
    for (;;) {
        if (!s->has_messages) {
            long micro_batch;
            if (s->next == 2 * p->m)
                break;
            int is_forward = pass_of(p, s->stage, s->next, &micro_batch);
            s->now = s->computed = s->now + p->seconds[2 * s->stage + !is_forward];
            s->next++;
            after_pass(e, s);
            s->posted = 0;
            continue;
        }
        if (s->send >= 0 && !s->posted) {
            push(e, s->now, which);
            return;
        }
        double end = s->now;
        int missing = 0;
        if (s->receive >= 0) {
            if (p->asked[s->receive] < 0)
                ask(e, p, s->receive, s->now);
            double arrival = p->arrival[s->receive];
            if (arrival < 0) {
                p->waiting[s->receive] = which;
                missing = 1;
            } else if (arrival > end)
                end = arrival;
        }
        if (p->waits && s->send >= 0) {
            double asked = p->asked[s->send];
            if (asked < 0) {
                p->asking[s->send] = which;
                missing = 1;
            } else {
                if (p->arrival[s->send] > end)
                    end = p->arrival[s->send];
                if (asked > end)
                    end = asked;
            }
        }
        if (missing) {
            s->blocked = 1;
            return;
        }
        s->now = end;
        s->posted = 0;
        after_messages(e, s);
    }
    if (s->sent_until > s->now)
        s->now = s->sent_until;
}

static void post(Engine *e, int32_t which, double now)
{
    Stage *s = &e->stages[which];
    Pipe *p = &e->pipes[s->pipe];
    const Crossing *c = &p->crossings[s->send / p->m];
    double start = now, last;
    s->posted = 1;
    for (long h = 0; h < c->num_hops; h++)
        if (e->path_free[c->hops[h].path] > start)
            start = e->path_free[c->hops[h].path];
    last = start;
    for (long h = 0; h < c->num_hops; h++) {
        double end = start + c->hops[h].seconds;
        e->path_free[c->hops[h].path] = end;
        if (end > last)
            last = end;
    }
    double arrival = last + c->latency;
    p->arrival[s->send] = arrival;
    if (arrival > s->sent_until)
        s->sent_until = arrival;
    wake(e, &p->waiting[s->send]);
}

static void free_pipes(Pipe *pipes, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; pipes != NULL && i < count; i++) {
        for (long c = 0; pipes[i].crossings != NULL && c < 2 * (pipes[i].n - 1); c++)
            free(pipes[i].crossings[c].hops);
        free(pipes[i].counts);
        free(pipes[i].seconds);
        free(pipes[i].crossings);
        free(pipes[i].arrival);
        free(pipes[i].asked);
        free(pipes[i].waiting);
        free(pipes[i].asking);
    }
    free(pipes);
}

/* Read (hop paths, hop seconds, latency). */
static int read_crossing(PyObject *given, Crossing *into, long num_paths)
{
    PyObject *paths, *seconds;
    if (!PyArg_ParseTuple(given, "OOd", &paths, &seconds, &into->latency))
        return 0;
    Py_ssize_t count = PySequence_Size(paths);
    if (count < 0)
        return 0;
    long *numbers = calloc((size_t)count + 1, sizeof(long));
    double *values = calloc((size_t)count + 1, sizeof(double));
    into->hops = calloc((size_t)count + 1, sizeof(Hop));
    into->num_hops = (long)count;
    int well = numbers != NULL && values != NULL && into->hops != NULL;
    if (!well)
        PyErr_NoMemory();
    well = well && read_longs(paths, count, numbers) && read_doubles(seconds, count, values);
    for (Py_ssize_t i = 0; well && i < count; i++) {
        if (numbers[i] < 0 || numbers[i] >= num_paths) {
            PyErr_SetString(PyExc_ValueError, "a path that there is not");
            well = 0;
        }
        into->hops[i].path = (int32_t)numbers[i];
        into->hops[i].seconds = values[i];
    }
    free(numbers);
    free(values);
    return well;
}

/* Read (counts, num_micro_batches, waits, forward_s, backward_s, forward, backward crossings). */
static int read_pipe(PyObject *given, Pipe *p, long num_paths)
{
    PyObject *counts, *forward, *backward, *there, *back;
    if (!PyArg_ParseTuple(given, "OlpOOOO", &counts, &p->m, &p->waits, &forward, &backward, &there,
                          &back))
        return 0;
    p->n = (long)PySequence_Size(counts);
    if (p->n < 1 || p->m < 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "one stage and one micro-batch at least");
        return 0;
    }
    size_t n = (size_t)p->n, hops = 2 * (n - 1), keys = hops * (size_t)p->m;
    p->counts = calloc(n, sizeof(long));
    p->seconds = calloc(2 * n, sizeof(double));
    p->crossings = calloc(hops + 1, sizeof(Crossing));
    p->arrival = calloc(keys + 1, sizeof(double));
    p->asked = calloc(keys + 1, sizeof(double));
    p->waiting = calloc(keys + 1, sizeof(int32_t));
    p->asking = calloc(keys + 1, sizeof(int32_t));
    double *both = calloc(2 * n, sizeof(double));
    if (!p->counts || !p->seconds || !p->crossings || !p->arrival || !p->asked || !p->waiting ||
        !p->asking || !both) {
        free(both);
        PyErr_NoMemory();
        return 0;
    }
    int well = read_longs(counts, p->n, p->counts) && read_doubles(forward, p->n, both) &&
               read_doubles(backward, p->n, both + n);
    for (size_t i = 0; i < n; i++) {
        p->seconds[2 * i] = both[i];
        p->seconds[2 * i + 1] = both[n + i];
    }
    free(both);
    for (size_t i = 0; i < keys; i++) {
        p->arrival[i] = p->asked[i] = -1.0;
        p->waiting[i] = p->asking[i] = -1;
    }
    for (size_t i = 0; well && i < hops; i++) {
        PyObject *one = PySequence_GetItem(i % 2 ? there : back, (Py_ssize_t)(i / 2));
        well = one != NULL && read_crossing(one, &p->crossings[i], num_paths);
        Py_XDECREF(one);
    }
    return well;
}

PyDoc_STRVAR(shared_ends_doc,
"shared_ends(pipelines, num_paths)\n\n"
"Return, for each pipeline, when each stage's last pass ends; None where some stage waits for ever.\n"
"A pipeline: (launch_counts, num_micro_batches, waits, forward_s, backward_s, forward, backward);\n"
"a crossing of a boundary: (paths, seconds on each, latency_s).");

static PyObject *shared_ends(PyObject *self, PyObject *args)
{
    PyObject *given, *found = NULL;
    long num_paths;
    if (!PyArg_ParseTuple(args, "Ol", &given, &num_paths))
        return NULL;
    Py_ssize_t count = PySequence_Size(given);
    if (count < 0)
        return NULL;
    Engine e = {0};
    long num_stages = 0;
    double *ends = NULL;
    e.pipes = calloc((size_t)count + 1, sizeof(Pipe));
    e.path_free = calloc((size_t)num_paths + 1, sizeof(double));
    if (e.pipes == NULL || e.path_free == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = PySequence_GetItem(given, i);
        int well = one != NULL && read_pipe(one, &e.pipes[i], num_paths);
        Py_XDECREF(one);
        if (!well)
            goto done;
        e.pipes[i].first_stage = num_stages;
        num_stages += e.pipes[i].n;
    }
    e.stages = calloc((size_t)num_stages + 1, sizeof(Stage));
    e.heap = calloc((size_t)num_stages + 1, sizeof(Event)); /* a stage queues one send at a time */
    e.ready = calloc((size_t)num_stages + 1, sizeof(int32_t));
    ends = calloc((size_t)num_stages + 1, sizeof(double));
    if (!e.stages || !e.heap || !e.ready || !ends) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        for (long s = 0; s < e.pipes[i].n; s++) {
            Stage *made = &e.stages[e.pipes[i].first_stage + s];
            made->pipe = (int32_t)i;
            made->stage = (int32_t)s;
            after_pass(&e, made);
        }
    for (long s = 0; s < num_stages; s++)
        advance(&e, (int32_t)s);
    while (e.size) {
        Event first = pop(&e);
        post(&e, first.stage, first.time);
        advance(&e, first.stage);
        while (e.num_ready)
            advance(&e, e.ready[--e.num_ready]);
    }
    for (long s = 0; s < num_stages; s++) {
        const Stage *one = &e.stages[s];
        if (one->has_messages || one->next < 2 * e.pipes[one->pipe].m) {
            found = Py_None;
            Py_INCREF(found);
            goto done;
        }
        ends[s] = one->computed;
    }
    found = PyTuple_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        PyObject *own = tuple_of(ends + e.pipes[i].first_stage, e.pipes[i].n);
        if (own == NULL || PyTuple_SetItem(found, i, own) < 0)
            Py_CLEAR(found);
    }
done:
    free_pipes(e.pipes, count);
    free(e.path_free);
    free(e.stages);
    free(e.heap);
    free(e.ready);
    free(ends);
    return found;
}

/* ---- a schedule for many divisions of the layers -------------------------------------------- */

enum { COMPUTE, SEND, ASK, ARRIVE, AGREE }; /* as `schedule.simulator.relaxed` */
#define BLOCK 64 /* divisions that are run together, so that their seconds stay near */

typedef struct {
    const int *steps;        /* [num_steps][4] */
    long num_steps, num_rows, num_stages, num_channels, num_messages, num_divisions;
    const double *rows;      /* [num_rows][num_divisions] */
    const double *busy, *latency; /* [num_channels] */
    double *ends;            /* [num_stages][num_divisions] */
} Relaxed;

/* Return 0 where a step names what there is not. */
static int is_sound(const Relaxed *r)
{
    for (long i = 0; i < r->num_steps; i++) {
        const int *step = r->steps + 4 * i;
        long most = step[0] == COMPUTE ? r->num_rows
                    : step[0] == SEND  ? r->num_channels
                                       : r->num_messages;
        if (step[0] < COMPUTE || step[0] > AGREE || step[1] < 0 || step[1] >= r->num_stages ||
            step[2] < 0 || step[2] >= most || step[3] < 0 ||
            (step[0] == SEND && step[3] >= r->num_messages))
            return 0;
    }
    return 1;
}

static void take_later(double *own, const double *other, long count)
{
    for (long k = 0; k < count; k++)
        own[k] = other[k] > own[k] ? other[k] : own[k];
}

/* Run the divisions `first` to `first + count`.  `space` has the lines of seconds of all stages
   (now, and until when messages are sent), channels and messages (arrived, asked for). */
static void run_relaxed(const Relaxed *r, long first, long count, double *space)
{
    double *now = space, *sent_until = now + r->num_stages * BLOCK;
    double *free_at = sent_until + r->num_stages * BLOCK;
    double *arrival = free_at + r->num_channels * BLOCK;
    double *asked = arrival + r->num_messages * BLOCK;
    memset(space, 0, (size_t)(arrival - space) * sizeof(double));
    for (long i = 0; i < r->num_steps; i++) {
        const int *step = r->steps + 4 * i;
        double *own = now + step[1] * BLOCK;
        if (step[0] == COMPUTE) {
            const double *row = r->rows + step[2] * r->num_divisions + first;
            for (long k = 0; k < count; k++)
                own[k] = own[k] + row[k];
        } else if (step[0] == SEND) {
            double *line = free_at + step[2] * BLOCK, *there = arrival + step[3] * BLOCK;
            double busy = r->busy[step[2]], latency = r->latency[step[2]];
            for (long k = 0; k < count; k++) {
                double done = (own[k] > line[k] ? own[k] : line[k]) + busy;
                line[k] = done;
                there[k] = done + latency;
            }
            take_later(sent_until + step[1] * BLOCK, there, count);
        } else if (step[0] == ASK) {
            memcpy(asked + step[2] * BLOCK, own, (size_t)count * sizeof(double));
        } else {
            take_later(own, (step[0] == ARRIVE ? arrival : asked) + step[2] * BLOCK, count);
        }
    }
    for (long s = 0; s < r->num_stages; s++) {
        take_later(now + s * BLOCK, sent_until + s * BLOCK, count);
        memcpy(r->ends + s * r->num_divisions + first, now + s * BLOCK,
               (size_t)count * sizeof(double));
    }
}

PyDoc_STRVAR(relaxed_ends_doc,
"relaxed_ends(steps, num_messages, rows_s, busy_s, latency_s, num_stages, ends_s)\n\n"
"Write when each stage's last computation or message ends, for many divisions of the layers.");

static PyObject *relaxed_ends(PyObject *self, PyObject *args)
{
    PyObject *given[5], *found = NULL;
    Relaxed r;
    Py_buffer steps = {0}, rows = {0}, ends = {0};
    double *space = NULL, *channels = NULL;
    if (!PyArg_ParseTuple(args, "OlOOOlO", &given[0], &r.num_messages, &given[1], &given[2],
                          &given[3], &r.num_stages, &given[4]))
        return NULL;
    r.num_channels = (long)PySequence_Size(given[2]);
    if (r.num_channels < 0)
        return NULL;
    if (PyObject_GetBuffer(given[0], &steps, PyBUF_C_CONTIGUOUS) ||
        PyObject_GetBuffer(given[1], &rows, PyBUF_C_CONTIGUOUS) ||
        PyObject_GetBuffer(given[4], &ends, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE))
        goto done;
    if (r.num_stages < 1 || r.num_messages < 0 || steps.itemsize != sizeof(int) ||
        rows.itemsize != sizeof(double) || ends.itemsize != sizeof(double) ||
        ends.len % (r.num_stages * (long)sizeof(double))) {
        PyErr_SetString(PyExc_ValueError, "the arrays of a relaxed run have other kinds or sizes");
        goto done;
    }
    r.num_divisions = (long)(ends.len / (Py_ssize_t)sizeof(double)) / r.num_stages;
    r.num_steps = (long)(steps.len / (Py_ssize_t)(4 * sizeof(int)));
    r.num_rows = r.num_divisions
                     ? (long)(rows.len / (Py_ssize_t)sizeof(double)) / r.num_divisions : 0;
    r.steps = steps.buf, r.rows = rows.buf, r.ends = ends.buf;
    if (r.num_divisions && !is_sound(&r)) {
        PyErr_SetString(PyExc_ValueError, "a step of a relaxed run names what there is not");
        goto done;
    }
    size_t lines = (size_t)(2 * r.num_stages + r.num_channels + 2 * r.num_messages);
    space = malloc(lines * BLOCK * sizeof(double));
    channels = malloc((size_t)(2 * r.num_channels + 1) * sizeof(double));
    if (space == NULL || channels == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    r.busy = channels, r.latency = channels + r.num_channels;
    if (!read_doubles(given[2], r.num_channels, channels) ||
        !read_doubles(given[3], r.num_channels, channels + r.num_channels))
        goto done;
    for (long first = 0; first < r.num_divisions; first += BLOCK) {
        long left = r.num_divisions - first;
        run_relaxed(&r, first, left < BLOCK ? left : BLOCK, space);
    }
    found = Py_NewRef(Py_None);
done:
    if (steps.obj)
        PyBuffer_Release(&steps);
    if (rows.obj)
        PyBuffer_Release(&rows);
    if (ends.obj)
        PyBuffer_Release(&ends);
    free(space);
    free(channels);
    return found;
}

/* ---- the least over many ways to go on --------------------------------------------------------- */

PyDoc_STRVAR(least_of_rests_doc,
"least_of_rests(least, rests_s, rows, add_s, floor_s)\n\n"
"Lower each row of `least` to the least of max(rests_s[row] + add_s, floor_s) over all ways.");

/* The arrays of `bounds.chains.rests`, in the order of the arguments. */
enum { LEAST, RESTS, ROWS, ADD, FLOOR, NUM_ARRAYS };

static void lower(float *restrict own, const float *restrict rest, float add, float floor,
                  Py_ssize_t count)
{
    for (Py_ssize_t k = 0; k < count; k++) {
        float there = rest[k] + add;
        there = there > floor ? there : floor;
        own[k] = there < own[k] ? there : own[k];
    }
}

static PyObject *least_of_rests(PyObject *self, PyObject *args)
{
    PyObject *given[NUM_ARRAYS], *found = NULL;
    Py_buffer arrays[NUM_ARRAYS] = {{0}};
    if (!PyArg_ParseTuple(args, "OOOOO", &given[LEAST], &given[RESTS], &given[ROWS], &given[ADD],
                          &given[FLOOR]))
        return NULL;
    for (int i = 0; i < NUM_ARRAYS; i++) {
        int flags = PyBUF_C_CONTIGUOUS | (i == LEAST ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(given[i], &arrays[i], flags))
            goto done;
    }
    int well = 1;
    for (int i = 0; i < NUM_ARRAYS; i++)
        well = well && arrays[i].ndim == 2 && arrays[i].itemsize == 4;
    if (!well || arrays[LEAST].shape[1] != arrays[RESTS].shape[1] ||
        arrays[ROWS].shape[1] != arrays[LEAST].shape[0] || arrays[ADD].len != arrays[ROWS].len ||
        arrays[FLOOR].len != arrays[ROWS].len) {
        PyErr_SetString(PyExc_ValueError, "the arrays of ways have other kinds or sizes");
        goto done;
    }
    const Py_ssize_t num_ways = arrays[ROWS].shape[0], num_rows = arrays[ROWS].shape[1];
    const Py_ssize_t size = arrays[LEAST].shape[1], num_rests = arrays[RESTS].shape[0];
    const int32_t *rows = arrays[ROWS].buf;
    const float *add = arrays[ADD].buf, *floor = arrays[FLOOR].buf, *rests = arrays[RESTS].buf;
    float *least = arrays[LEAST].buf;
    for (Py_ssize_t i = 0; i < num_ways * num_rows; i++)
        if (rows[i] < 0 || rows[i] >= num_rests) {
            PyErr_SetString(PyExc_ValueError, "a way takes a row that there is not");
            goto done;
        }
    for (Py_ssize_t row = 0; row < num_rows; row++)
        for (Py_ssize_t at = row; at < num_ways * num_rows; at += num_rows)
            if (floor[at] < INFINITY) /* others lower nothing */
                lower(least + row * size, rests + rows[at] * size, add[at], floor[at], size);
    found = Py_NewRef(Py_None);
done:
    for (int i = 0; i < NUM_ARRAYS; i++)
        if (arrays[i].obj)
            PyBuffer_Release(&arrays[i]);
    return found;
}

/* ---- the cheapest sequences of blocks ----------------------------------------------------------- */

PyDoc_STRVAR(block_paths_doc,
"block_paths(layers, base_s, first_layers, first_base_s, num_widths, layer_s, hops_s, may_start,\n"
"            may_end, prices, periods_s, less, end_cost, end, by)\n\n"
"Write the end of the cheapest pipeline of each period, and the block before each state.");

/* The arrays of `planner.columns.bundle_paths`, in the order of the arguments. */
enum {
    HELD, BASE, FIRST_HELD, FIRST_BASE, WIDTHS, LAYER_S, HOPS, MAY_START, MAY_END, PRICES, PERIODS,
    END_COST, END, BY, NUM_OF_PATHS
};

typedef struct {
    Py_ssize_t depth, num_blocks, all_periods;  /* of the menu */
    Py_ssize_t num_periods, num_layers;
    void *at[NUM_OF_PATHS];
    double *cost;     /* [depth + 1][period][layers behind] */
    char *has;        /* [depth + 1], whether a sequence has so many stages */
    double *least;    /* [depth][period], cost of a layer of any block with as many stages behind */
    double left;      /* most cost of a block beyond the least of its layers */
} BlockSearch;

#define PATHS(type, name) ((const type *)b->at[name])

/* Find the least cost of a layer of any block with at least so many stages behind, times `less`. */
static void price_layers(const BlockSearch *b, double less)
{
    for (Py_ssize_t stages = b->depth - 1; stages >= 0; stages--)
        for (Py_ssize_t period = 0; period < b->num_periods; period++) {
            const double period_s = PATHS(double, PERIODS)[period];
            double least = INFINITY;
            for (Py_ssize_t i = 0; i < 2 * b->num_blocks; i++) {
                const Py_ssize_t block = i / 2, row = stages * b->num_blocks + block;
                const void *held = b->at[i % 2 ? FIRST_HELD : HELD];
                const int16_t layers = ((const int16_t *)held)[row * b->all_periods + period];
                if (layers <= 0)
                    continue;
                const double *base = b->at[i % 2 ? FIRST_BASE : BASE];
                const double beside = PATHS(double, PRICES)[block] + base[row] / period_s;
                const double one = beside / layers + PATHS(double, LAYER_S)[block] / period_s;
                least = one < least ? one : least;
            }
            double *own = b->least + stages * b->num_periods + period;
            *own = least * less;
            if (stages + 1 < b->depth && own[b->num_periods] < *own)
                *own = own[b->num_periods];
        }
}

/* Close the states of `stages` stages with a block that holds the first layers. */
static void close_paths(const BlockSearch *b, Py_ssize_t stages, Py_ssize_t period, double *end_cost,
                        int64_t *end)
{
    const double each = b->least[stages * b->num_periods + period];
    const double period_s = PATHS(double, PERIODS)[period];
    const double *cost = b->cost + (stages * b->num_periods + period) * b->num_layers;
    double least = INFINITY;
    Py_ssize_t block = -1, behind = -1;
    for (Py_ssize_t i = 0; i < b->num_blocks; i++) {
        if (!PATHS(char, MAY_START)[i] || (stages == 0 && !PATHS(char, MAY_END)[i]))
            continue;
        const Py_ssize_t row = stages * b->num_blocks + i;
        const int64_t most = PATHS(int16_t, FIRST_HELD)[row * b->all_periods + period];
        const int64_t width = PATHS(int64_t, WIDTHS)[i];
        if (most < width)
            continue;
        const double fixed = PATHS(double, PRICES)[i] + PATHS(double, FIRST_BASE)[row] / period_s;
        const double layer = PATHS(double, LAYER_S)[i] / period_s, more = layer - each;
        /* Layers dearer than the least price count as few as there can be, cheaper ones as many. */
        if (!(fixed + (double)(more > 0 ? width : most) * more < b->left))
            continue;
        const double hop = stages ? PATHS(double, HOPS)[i] / period_s : 0.0, added = fixed + hop;
        for (Py_ssize_t at = b->num_layers - most; at <= b->num_layers - width; at++) {
            const double total = cost[at] + layer * (double)(b->num_layers - at) + added;
            if (total < least)
                least = total, block = i, behind = at;
        }
    }
    if (least < end_cost[period]) {
        end_cost[period] = least;
        end[0] = stages, end[1] = block, end[2] = behind;
    }
}

/* Put each block before the states of `stages` stages. */
static void extend_paths(const BlockSearch *b, Py_ssize_t stages, Py_ssize_t period, int16_t *by)
{
    const double each = b->least[stages * b->num_periods + period];
    const double period_s = PATHS(double, PERIODS)[period];
    const double *cost = b->cost + (stages * b->num_periods + period) * b->num_layers;
    for (Py_ssize_t i = 0; i < b->num_blocks; i++) {
        const Py_ssize_t row = stages * b->num_blocks + i;
        const int64_t held = PATHS(int16_t, HELD)[row * b->all_periods + period];
        if (held <= 0 || (stages == 0 && !PATHS(char, MAY_END)[i]))
            continue;
        const double seconds =
            (double)held * PATHS(double, LAYER_S)[i] + PATHS(double, BASE)[row];
        const double hop = stages ? PATHS(double, HOPS)[i] / period_s : 0.0;
        const double added = PATHS(double, PRICES)[i] + seconds / period_s + hop;
        if (!(added - (double)held * each < b->left))
            continue;
        const Py_ssize_t next = stages + PATHS(int64_t, WIDTHS)[i];
        const Py_ssize_t to = (next * b->num_periods + period) * b->num_layers;
        b->has[next] = 1;
        for (Py_ssize_t at = held; at < b->num_layers; at++) {
            const double made = cost[at - held] + added;
            if (made < b->cost[to + at])
                b->cost[to + at] = made, by[to + at] = (int16_t)i;
        }
    }
}

/* Whether the arrays are of the kinds and sizes that belong together, and no block leads beyond the
   deepest pipeline. */
static int reads_blocks(BlockSearch *b, const Py_buffer *arrays)
{
    static const char sizes[] = {2, 8, 2, 8, 8, 8, 8, 1, 1, 8, 8, 8, 8, 2};
    static const char dims[] = {3, 2, 3, 2, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3};
    for (int i = 0; i < NUM_OF_PATHS; i++) {
        if (arrays[i].itemsize != sizes[i] || arrays[i].ndim != dims[i])
            return 0;
        b->at[i] = arrays[i].buf;
    }
    const Py_ssize_t *held = arrays[HELD].shape, *by = arrays[BY].shape;
    b->depth = held[0], b->num_blocks = held[1], b->all_periods = held[2];
    b->num_periods = by[1], b->num_layers = by[2];
    const Py_ssize_t states = b->depth * b->num_blocks, periods = b->num_periods;
    const Py_ssize_t wanted[] = {
        states * b->all_periods, states, states * b->all_periods, states, b->num_blocks,
        b->num_blocks, b->num_blocks, b->num_blocks, b->num_blocks, b->num_blocks, periods,
        periods, 3 * periods, (b->depth + 1) * periods * b->num_layers};
    for (int i = 0; i < NUM_OF_PATHS; i++)
        if (arrays[i].len != wanted[i] * sizes[i])
            return 0;
    if (periods > b->all_periods || b->num_blocks > INT16_MAX)
        return 0;
    for (Py_ssize_t row = 0; row < states; row++) {
        const int64_t width = PATHS(int64_t, WIDTHS)[row % b->num_blocks];
        for (Py_ssize_t period = 0; period < periods; period++) {
            const Py_ssize_t at = row * b->all_periods + period;
            const int held_there = PATHS(int16_t, HELD)[at];
            if (width < 1 || held_there > b->num_layers ||
                PATHS(int16_t, FIRST_HELD)[at] > b->num_layers ||
                (held_there > 0 && row / b->num_blocks + width > b->depth))
                return 0;
        }
    }
    return 1;
}

static PyObject *block_paths(PyObject *self, PyObject *args)
{
    PyObject *given[NUM_OF_PATHS], *found = NULL;
    Py_buffer arrays[NUM_OF_PATHS] = {{0}};
    BlockSearch search = {0}, *b = &search;
    double less;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOOdOOO", &given[0], &given[1], &given[2], &given[3],
                          &given[4], &given[5], &given[6], &given[7], &given[8], &given[9],
                          &given[10], &less, &given[11], &given[12], &given[13]))
        return NULL;
    for (int i = 0; i < NUM_OF_PATHS; i++)
        if (PyObject_GetBuffer(given[i], &arrays[i],
                               PyBUF_C_CONTIGUOUS | (i >= END_COST ? PyBUF_WRITABLE : 0)))
            goto done;
    if (!reads_blocks(b, arrays)) {
        PyErr_SetString(PyExc_ValueError, "the arrays of blocks have other kinds or sizes");
        goto done;
    }
    const Py_ssize_t row = b->num_periods * b->num_layers, size = (b->depth + 1) * row;
    b->cost = malloc((size_t)size * sizeof(double));
    b->has = calloc((size_t)b->depth + 1, 1);
    b->least = malloc((size_t)(b->depth * b->num_periods + 1) * sizeof(double));
    if (b->cost == NULL || b->has == NULL || b->least == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    price_layers(b, less);
    for (Py_ssize_t i = 0; i < size; i++)
        b->cost[i] = INFINITY;
    for (Py_ssize_t period = 0; period < b->num_periods; period++)
        b->cost[period * b->num_layers] = 0.0;
    b->has[0] = 1;
    double *end_cost = arrays[END_COST].buf;
    for (Py_ssize_t stages = 0; stages < b->depth; stages++)
        for (Py_ssize_t period = 0; b->has[stages] && period < b->num_periods; period++) {
            /* A bound of every pipeline that goes on from these states. */
            const double each = b->least[stages * b->num_periods + period];
            const double *cost = b->cost + stages * row + period * b->num_layers;
            double whole = INFINITY;
            for (Py_ssize_t at = 0; at < b->num_layers; at++) {
                const double one = cost[at] + each * (double)(b->num_layers - at);
                whole = one < whole ? one : whole;
            }
            if (!(whole < end_cost[period]))
                continue;
            b->left = end_cost[period] - whole;
            close_paths(b, stages, period, end_cost, (int64_t *)arrays[END].buf + 3 * period);
            extend_paths(b, stages, period, arrays[BY].buf);
        }
    found = Py_NewRef(Py_None);
done:
    free(b->cost);
    free(b->has);
    free(b->least);
    for (int i = 0; i < NUM_OF_PATHS; i++)
        if (arrays[i].obj)
            PyBuffer_Release(&arrays[i]);
    return found;
}

/* ---- layers divided among stages -------------------------------------------------------------- */

typedef struct {
    Py_ssize_t n;          /* stages */
    long num_layers;
    PyObject **times;      /* [n], seconds with 1, 2, ... layers: tuples or lists of floats */
    long *room;            /* [n], layers that fit */
    long *layers, *made;   /* [n] */
} Division;

/* Seconds of a stage with `count` + 1 layers.  The tables are read where they are, since few of
   their entries are asked for; an error is left for the caller to find. */
static double seconds_of(const Division *d, Py_ssize_t stage, long count)
{
    PyObject *of = d->times[stage];
    if (PyTuple_Check(of)) {
        PyObject *item = PyTuple_GetItem(of, count);
        return item == NULL ? 0.0 : PyFloat_AsDouble(item);
    }
    PyObject *item = PySequence_GetItem(of, count);
    double found = item == NULL ? 0.0 : PyFloat_AsDouble(item);
    Py_XDECREF(item);
    return found;
}

static void free_division(Division *d)
{
    for (Py_ssize_t i = 0; d->times != NULL && i < d->n; i++)
        Py_XDECREF(d->times[i]);
    free(d->times);
    free(d->room);
}

/* Return 0 with an exception set where the tables are of another kind. */
static int read_division(PyObject *given, Division *d)
{
    d->n = PySequence_Size(given);
    if (d->n < 0)
        return 0;
    d->times = calloc((size_t)d->n + 1, sizeof(PyObject *));
    d->room = calloc(3 * (size_t)d->n + 1, sizeof(long));
    if (d->times == NULL || d->room == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    d->layers = d->room + d->n;
    d->made = d->layers + d->n;
    for (Py_ssize_t i = 0; i < d->n; i++) {
        d->times[i] = PySequence_GetItem(given, i);
        Py_ssize_t room = d->times[i] == NULL ? -1 : PySequence_Size(d->times[i]);
        if (room < 0)
            return 0;
        d->room[i] = (long)room;
    }
    return 1;
}

/* `planner.division.layers.minimax`: one layer at a time to the stage that then ends first, of
   equal ones to the last.  Return 0 where the layers do not fit. */
static int fill(Division *d, double *next)
{
    long total = 0;
    if (d->n < 1 || d->n > d->num_layers)
        return 0;
    for (Py_ssize_t i = 0; i < d->n; i++) {
        if (!d->room[i])
            return 0;
        total += d->room[i];
    }
    if (total < d->num_layers)
        return 0;
    for (Py_ssize_t i = 0; i < d->n; i++) {
        d->layers[i] = 1;
        next[i] = d->room[i] > 1 ? seconds_of(d, i, 1) : 0.0;
    }
    for (long left = d->num_layers - (long)d->n; left > 0; left--) {
        Py_ssize_t first = -1;
        for (Py_ssize_t i = 0; i < d->n; i++)
            if (d->layers[i] < d->room[i] && (first < 0 || next[i] <= next[first]))
                first = i;
        if (++d->layers[first] < d->room[first])
            next[first] = seconds_of(d, first, d->layers[first]);
    }
    return 1;
}

/* Count the entries of a stage's table up to `limit`, as `bisect.bisect_right`. */
static long most_within(const Division *d, Py_ssize_t stage, double limit)
{
    long low = 0, high = d->room[stage];
    while (low < high) {
        long middle = (low + high) / 2;
        if (limit < seconds_of(d, stage, middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* `planner.completion.filled.balanced`, from the layers of `fill` on. */
static void halve(Division *d, const double *trips, double number, long num_halvings)
{
    double low = 0.0, high = 0.0, way = 0.0;
    for (Py_ssize_t i = 0; i < d->n; i++) {
        double own = seconds_of(d, i, d->layers[i] - 1), end = way + number * own;
        high = end > high ? end : high;
        way = way + (own + trips[i]);
    }
    for (long k = 0; k < num_halvings; k++) {
        double limit = low != 0.0 ? (low + high) / 2 : 0.8 * high;
        long total = 0;
        Py_ssize_t i = 0;
        for (way = 0.0; i < d->n; i++) {
            d->made[i] = most_within(d, i, (limit - way) / number);
            if (!d->made[i])
                break;
            total += d->made[i];
            way = way + (seconds_of(d, i, d->made[i] - 1) + trips[i]);
        }
        if (i < d->n || total < d->num_layers) {
            low = limit;
            continue;
        }
        high = limit;
        long excess = total - d->num_layers;
        for (i = 0; i < d->n; i++) {
            long less = excess < d->made[i] - 1 ? excess : d->made[i] - 1;
            d->layers[i] = d->made[i] - less;
            excess -= less;
        }
    }
}

PyDoc_STRVAR(divide_layers_doc,
"divide_layers(num_layers, times_s, trips_s, num_micro_batches, num_halvings)\n\n"
"Return layers by stage such that the slowest stage is as fast as possible, then, by so many\n"
"halvings, such that the way there and back counts too; None where the layers do not fit.");

static PyObject *divide_layers(PyObject *self, PyObject *args)
{
    PyObject *given, *given_trips, *found = NULL;
    Division d = {0};
    double *space = NULL, number;
    long num_halvings;
    if (!PyArg_ParseTuple(args, "lOOdl", &d.num_layers, &given, &given_trips, &number,
                          &num_halvings))
        return NULL;
    if (!read_division(given, &d))
        goto done;
    space = calloc(2 * (size_t)d.n + 1, sizeof(double));
    if (space == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    /* A boundary is behind each stage but the last. */
    if (num_halvings && d.n && !read_doubles(given_trips, d.n - 1, space + d.n))
        goto done;
    if (!fill(&d, space)) {
        found = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        goto done;
    }
    if (num_halvings && d.n > 1)
        halve(&d, space + d.n, number, num_halvings);
    if (PyErr_Occurred())
        goto done;
    found = PyTuple_New(d.n);
    for (Py_ssize_t i = 0; found != NULL && i < d.n; i++) {
        PyObject *value = PyLong_FromLong(d.layers[i]);
        if (value == NULL || PyTuple_SetItem(found, i, value) < 0)
            Py_CLEAR(found);
    }
done:
    free_division(&d);
    free(space);
    return found;
}

/* ---- the busiest path under exchanges around rings ---------------------------------------------- */

enum { INSIDE, BETWEEN }; /* as `planner.evaluate.tail`; else a line */

PyDoc_STRVAR(busiest_path_doc,
"busiest_path(rings, num_paths)\n\n"
"Return the seconds of the busiest path.  A ring: (numbers, bytes); its numbers are its factor, its\n"
"width, and five for each way: kind, path, how often, rate, seconds of latency.");

static PyObject *busiest_path(PyObject *self, PyObject *args)
{
    PyObject *rings, *found = NULL;
    long num_paths;
    if (!PyArg_ParseTuple(args, "Ol", &rings, &num_paths))
        return NULL;
    Py_ssize_t count = PySequence_Size(rings);
    if (count < 0)
        return NULL;
    double *seconds = calloc((size_t)(num_paths > 0 ? num_paths : 0) + 1, sizeof(double));
    if (seconds == NULL)
        return PyErr_NoMemory();
    double busiest = 0.0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *flat, *one = PySequence_GetItem(rings, i);
        Py_buffer buffer = {0};
        double num_bytes;
        if (one == NULL || !PyArg_ParseTuple(one, "Od", &flat, &num_bytes) ||
            PyObject_GetBuffer(flat, &buffer, PyBUF_C_CONTIGUOUS)) {
            Py_XDECREF(one);
            goto done;
        }
        const double *ring = buffer.buf;
        const Py_ssize_t size = buffer.len / (Py_ssize_t)sizeof(double);
        int well = buffer.itemsize == sizeof(double) && size >= 2 && (size - 2) % 5 == 0;
        /* A path's seconds only grow, so that the largest on the way is the largest in the end. */
        const double part = well ? ring[0] * num_bytes : 0.0, parts = well ? part / ring[1] : 0.0;
        for (Py_ssize_t at = 2; well && at < size; at += 5) {
            const long kind = (long)ring[at], path = (long)ring[at + 1];
            const double rate = ring[at + 3], latency = ring[at + 4];
            well = path >= 0 && path < num_paths;
            if (!well)
                break;
            seconds[path] += kind == INSIDE    ? ring[at + 2] * (parts * rate + latency)
                             : kind == BETWEEN ? part * rate + latency
                                               : part / rate;
            busiest = seconds[path] > busiest ? seconds[path] : busiest;
        }
        PyBuffer_Release(&buffer);
        Py_DECREF(one);
        if (!well) {
            PyErr_SetString(PyExc_ValueError, "a ring takes a path that there is not");
            goto done;
        }
    }
    found = PyFloat_FromDouble(busiest);
done:
    free(seconds);
    return found;
}

/* ---- exchanges that share paths ----------------------------------------------------------------- */

typedef struct {
    Py_buffer paths, seconds;  /* int64 and float64, as many of each */
    double latency, first, last, bucket_share, num_buckets, window, due;
} Exchange;

/* Paths by number, in a table with open addresses: when each is free, and for how long it is busy. */
typedef struct {
    int64_t *path;  /* -1: free place */
    double *free_at, *busy;
    size_t mask;
} Paths;

static size_t place_of(const Paths *p, int64_t path)
{
    size_t at = ((size_t)path * (size_t)0x9E3779B97F4A7C15u) & p->mask;
    while (p->path[at] >= 0 && p->path[at] != path)
        at = (at + 1) & p->mask;
    return at;
}

static double paced(const Exchange *e, double bucket)
{
    double other = bucket / e->window;
    other = (other < bucket ? other : bucket) + e->latency / e->window;
    return other > bucket ? other : bucket;
}

static double last_bucket(const Exchange *e, double longest)
{
    return longest * (1 - (e->num_buckets - 1) * e->bucket_share);
}

/* `cost.sync.exchange_clock._BusyPaths.take`. */
static double take_paths(Paths *p, const Exchange *e, double begin)
{
    const int64_t *paths = e->paths.buf;
    const double *seconds = e->seconds.buf;
    const Py_ssize_t count = e->paths.len / (Py_ssize_t)sizeof(int64_t);
    double end = begin, longest = 0.0;
    for (Py_ssize_t i = 0; i < count; i++) {
        double *free_at = &p->free_at[place_of(p, paths[i])];
        double done = (*free_at > begin ? *free_at : begin) + seconds[i];
        *free_at = done;
        end = done > end ? done : end;
        longest = seconds[i] > longest ? seconds[i] : longest;
    }
    double bucket = longest * e->bucket_share;
    double at_once = e->window > 1.0 ? e->window : 1.0;
    double waiting = e->num_buckets - at_once > 0.0 ? e->num_buckets - at_once : 0.0;
    if (waiting > 0.0)
        end += waiting * (paced(e, bucket) - bucket);
    double last = e->last + last_bucket(e, longest);
    double turns = 1 / e->window > 1.0 ? 1 / e->window : 1.0;
    return (last > end ? last : end) + e->latency * turns;
}

/* One holder of one exchange, and the part of its room that a bucket takes. */
typedef struct {
    long step, holder;
    double part;
} Holding;

/* The room of one holder: buckets under way in the order of their ends, and its exchanges. */
typedef struct {
    long *own;        /* places in the list of holdings, in order */
    long count, next;
    double *end_at, *freed;  /* of buckets; those before `head` have left */
    long head, size, most;
    double taken;
} Room;

typedef struct {
    Holding *all;  /* step by step */
    long *firsts;  /* [step], in `all`, and their number */
    Room *rooms;
    long num_rooms;
    double *begin;
    long *missing, *ready;
    long num_ready;
    double rounding;
} Rooms;

static void free_rooms(Rooms *r)
{
    for (long i = 0; r->rooms != NULL && i < r->num_rooms; i++) {
        free(r->rooms[i].own);
        free(r->rooms[i].end_at);
        free(r->rooms[i].freed);
    }
    free(r->all);
    free(r->firsts);
    free(r->rooms);
    free(r->begin);
    free(r->missing);
    free(r->ready);
}

/* Read [step] -> (numbers of its holders, parts of their rooms).  Numbers rise as holders first come,
   so that all are below the number of holdings. */
static int read_rooms(Rooms *r, PyObject *given, const Exchange *steps, Py_ssize_t count)
{
    r->firsts = calloc((size_t)count + 1, sizeof(long));
    r->begin = calloc((size_t)count + 1, sizeof(double));
    r->missing = calloc((size_t)count + 1, sizeof(long));
    r->ready = calloc((size_t)count + 1, sizeof(long));
    if (!r->firsts || !r->begin || !r->missing || !r->ready) {
        PyErr_NoMemory();
        return 0;
    }
    long total = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *numbers, *parts, *one = PySequence_GetItem(given, i);
        long *own = NULL;
        double *part = NULL;
        int well = one != NULL && PyArg_ParseTuple(one, "OO", &numbers, &parts);
        Py_ssize_t num = well ? PySequence_Size(numbers) : -1;
        if (num >= 0) {
            own = calloc((size_t)num + 1, sizeof(long));
            part = calloc((size_t)num + 1, sizeof(double));
            Holding *more = realloc(r->all, ((size_t)total + (size_t)num + 1) * sizeof(Holding));
            if (more != NULL)
                r->all = more;
            if (own == NULL || part == NULL || more == NULL)
                PyErr_NoMemory();
            else if (read_longs(numbers, num, own) && read_doubles(parts, num, part))
                for (Py_ssize_t k = 0; k < num; k++) {
                    if (own[k] < 0 || own[k] > r->num_rooms) {
                        PyErr_SetString(PyExc_ValueError, "holders of an exchange skip a number");
                        break;
                    }
                    r->num_rooms += own[k] == r->num_rooms;
                    r->all[total++] = (Holding){(long)i, own[k], part[k]};
                }
        }
        free(own);
        free(part);
        Py_XDECREF(one);
        if (PyErr_Occurred())
            return 0;
        r->firsts[i + 1] = total;
        r->missing[i] = total - r->firsts[i];
        r->begin[i] = steps[i].first;
    }
    r->rooms = calloc((size_t)r->num_rooms + 1, sizeof(Room));
    if (r->rooms == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (long k = 0; k < total; k++)
        r->rooms[r->all[k].holder].most++;
    for (long i = 0; i < r->num_rooms; i++) {
        r->rooms[i].own = calloc((size_t)r->rooms[i].most + 1, sizeof(long));
        if (r->rooms[i].own == NULL) {
            PyErr_NoMemory();
            return 0;
        }
        r->rooms[i].most = 0;
    }
    for (long k = 0; k < total; k++) {
        Room *room = &r->rooms[r->all[k].holder];
        room->own[room->count++] = k;
    }
    return 1;
}

/* `_HolderRoom.found_s`, and what `_windowed` does when a holder comes to its next exchange. */
static void come(Rooms *r, long holder)
{
    Room *room = &r->rooms[holder];
    if (room->next == room->count)
        return;
    const Holding *h = &r->all[room->own[room->next++]];
    double end = 0.0;
    while (h->part != 0.0 && room->head < room->size && room->taken + h->part > 1 + r->rounding) {
        room->taken -= room->freed[room->head];
        end = room->end_at[room->head] > end ? room->end_at[room->head] : end;
        room->head++;
    }
    if (end > r->begin[h->step])
        r->begin[h->step] = end;
    if (--r->missing[h->step] == 0)
        r->ready[r->num_ready++] = h->step;
}

/* `_HolderRoom.take`; 0 where there is no memory. */
static int take_room(Rooms *r, const Exchange *e, const Holding *h, double longest, double end)
{
    Room *room = &r->rooms[h->holder];
    double period = paced(e, last_bucket(e, longest));
    double ratio = 1 / h->part, freed = h->part < 1.0 ? h->part : 1.0;
    long num = ratio + r->rounding < 1e9 ? (long)(ratio + r->rounding) : 1000000000;
    num = ratio < 1 || num < 1 ? 1 : num;
    num = (double)num > e->num_buckets ? (long)e->num_buckets : num;
    if (room->size + num > room->most) {
        /* Buckets that have left make place first. */
        long left = room->size - room->head, most = 2 * (left + num);
        double *ends = malloc((size_t)most * sizeof(double));
        double *parts = malloc((size_t)most * sizeof(double));
        if (ends == NULL || parts == NULL) {
            free(ends);
            free(parts);
            return 0;
        }
        for (long k = 0; k < left; k++) {
            ends[k] = room->end_at[room->head + k];
            parts[k] = room->freed[room->head + k];
        }
        free(room->end_at);
        free(room->freed);
        room->end_at = ends;
        room->freed = parts;
        room->head = 0;
        room->size = left;
        room->most = most;
    }
    for (long n = num - 1; n >= 0; n--) {
        room->end_at[room->size] = end - (double)n * period;
        room->freed[room->size++] = freed;
    }
    room->taken += (double)num * freed;
    return 1;
}

/* `cost.sync.exchange_clock._windowed`; -1 with an exception set where there is no memory. */
static double run_in_rooms(Rooms *r, Paths *p, const Exchange *steps)
{
    double last = 0.0;
    for (long holder = 0; holder < r->num_rooms; holder++)
        come(r, holder);
    while (r->num_ready) {
        long at = 0;
        for (long i = 1; i < r->num_ready; i++) {
            long one = r->ready[i], best = r->ready[at];
            if (r->begin[one] < r->begin[best] || (r->begin[one] == r->begin[best] && one < best))
                at = i;
        }
        long step = r->ready[at];
        r->ready[at] = r->ready[--r->num_ready];
        const Exchange *e = &steps[step];
        double end = take_paths(p, e, r->begin[step]);
        last = end - e->due > last ? end - e->due : last;
        double longest = 0.0;
        const double *seconds = e->seconds.buf;
        for (Py_ssize_t i = 0; i < e->seconds.len / (Py_ssize_t)sizeof(double); i++)
            longest = seconds[i] > longest ? seconds[i] : longest;
        for (long k = r->firsts[step]; k < r->firsts[step + 1]; k++) {
            if (r->all[k].part != 0.0 && !take_room(r, e, &r->all[k], longest, end)) {
                PyErr_NoMemory();
                return -1.0;
            }
            come(r, r->all[k].holder);
        }
    }
    return last;
}

PyDoc_STRVAR(latest_end_doc,
"latest_end(steps, order, carried, carried_s, holders, rounding)\n\n"
"Return when the last of some exchanges is done, each counted from when it is due.  A step: paths,\n"
"seconds on each, latency, begin of the first bucket and of the last, a bucket's part of it, number\n"
"of buckets, window, and when it is due; `order`: the numbers of the steps as they begin; `carried`:\n"
"paths that something else takes, for so long.\n"
"`holders`: numbers of each step's holders and parts of their rooms for a bucket, where the order\n"
"follows from these; empty where all buckets find room.");

static PyObject *latest_end(PyObject *self, PyObject *args)
{
    PyObject *steps, *order, *carried, *carried_s, *holders, *found = NULL;
    Rooms rooms = {0};
    if (!PyArg_ParseTuple(args, "OOOOOd", &steps, &order, &carried, &carried_s, &holders,
                          &rooms.rounding))
        return NULL;
    Py_ssize_t count = PySequence_Size(steps), num_carried = PySequence_Size(carried);
    Py_ssize_t num_held = PySequence_Size(holders);
    if (count < 0 || num_carried < 0 || num_held < 0)
        return NULL;
    Exchange *all = calloc((size_t)count + 1, sizeof(Exchange));
    long *in_order = calloc((size_t)count + 1, sizeof(long));
    double *others = calloc((size_t)num_carried + 1, sizeof(double));
    Paths p = {0};
    size_t total = 0;
    if (all == NULL || in_order == NULL || others == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *paths, *seconds, *one = PySequence_GetItem(steps, i);
        Exchange *e = &all[i];
        int well = one != NULL &&
                   PyArg_ParseTuple(one, "OOddddddd", &paths, &seconds, &e->latency, &e->first,
                                    &e->last, &e->bucket_share, &e->num_buckets, &e->window,
                                    &e->due) &&
                   !PyObject_GetBuffer(paths, &e->paths, PyBUF_C_CONTIGUOUS) &&
                   !PyObject_GetBuffer(seconds, &e->seconds, PyBUF_C_CONTIGUOUS);
        Py_XDECREF(one);
        if (!well)
            goto done;
        if (e->paths.itemsize != sizeof(int64_t) || e->seconds.itemsize != sizeof(double) ||
            e->paths.len != e->seconds.len) {
            PyErr_SetString(PyExc_ValueError, "the arrays of an exchange have other kinds or sizes");
            goto done;
        }
        total += (size_t)e->paths.len / sizeof(int64_t);
    }
    if (!(num_held ? read_rooms(&rooms, holders, all, count) : read_longs(order, count, in_order)) ||
        !read_doubles(carried_s, num_carried, others))
        goto done;
    for (p.mask = 15; p.mask < 2 * total; p.mask = 2 * p.mask + 1)
        ;
    p.path = malloc((p.mask + 1) * sizeof(int64_t));
    p.free_at = calloc(p.mask + 1, sizeof(double));
    p.busy = calloc(p.mask + 1, sizeof(double));
    if (p.path == NULL || p.free_at == NULL || p.busy == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    memset(p.path, -1, (p.mask + 1) * sizeof(int64_t));
    /* How long each path is busy in all, step by step, then with what else it carries. */
    double latest = 0.0, busiest = 0.0, due = 0.0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t *paths = all[i].paths.buf;
        const double *seconds = all[i].seconds.buf;
        for (Py_ssize_t k = 0; k < all[i].paths.len / (Py_ssize_t)sizeof(int64_t); k++) {
            if (paths[k] < 0) {
                PyErr_SetString(PyExc_ValueError, "an exchange takes a path that there is not");
                goto done;
            }
            size_t at = place_of(&p, paths[k]);
            p.path[at] = paths[k];
            p.busy[at] += seconds[k];
        }
    }
    for (Py_ssize_t i = 0; i < num_carried; i++) {
        PyObject *number = PySequence_GetItem(carried, i);
        int64_t path = number == NULL ? -1 : PyLong_AsLongLong(number);
        Py_XDECREF(number);
        if (path < 0 && PyErr_Occurred())
            goto done;
        size_t at = path < 0 ? 0 : place_of(&p, path);
        if (path >= 0 && p.path[at] == path)
            p.busy[at] += others[i];
    }
    for (size_t at = 0; at <= p.mask; at++)
        busiest = p.busy[at] > busiest ? p.busy[at] : busiest;
    for (Py_ssize_t i = 0; i < count; i++)
        due = all[i].due > due ? all[i].due : due;
    busiest -= due;
    if (num_held && (latest = run_in_rooms(&rooms, &p, all)) < 0.0)
        goto done;
    for (Py_ssize_t i = 0; !num_held && i < count; i++) {
        if (in_order[i] < 0 || in_order[i] >= count) {
            PyErr_SetString(PyExc_ValueError, "an order of exchanges that there are not");
            goto done;
        }
        const Exchange *e = &all[in_order[i]];
        double end = take_paths(&p, e, e->first) - e->due;
        latest = !i || end > latest ? end : latest;
    }
    found = PyFloat_FromDouble(busiest > latest ? busiest : latest);
done:
    for (Py_ssize_t i = 0; all != NULL && i < count; i++) {
        if (all[i].paths.obj)
            PyBuffer_Release(&all[i].paths);
        if (all[i].seconds.obj)
            PyBuffer_Release(&all[i].seconds);
    }
    free_rooms(&rooms);
    free(all);
    free(in_order);
    free(others);
    free(p.path);
    free(p.free_at);
    free(p.busy);
    return found;
}

/* ---- the module ---------------------------------------------------------------------------- */

static PyMethodDef METHODS[] = {
    {"stage_ends", stage_ends, METH_VARARGS, stage_ends_doc},
    {"shared_ends", shared_ends, METH_VARARGS, shared_ends_doc},
    {"relaxed_ends", relaxed_ends, METH_VARARGS, relaxed_ends_doc},
    {"least_of_rests", least_of_rests, METH_VARARGS, least_of_rests_doc},
    {"block_paths", block_paths, METH_VARARGS, block_paths_doc},
    {"divide_layers", divide_layers, METH_VARARGS, divide_layers_doc},
    {"busiest_path", busiest_path, METH_VARARGS, busiest_path_doc},
    {"latest_end", latest_end, METH_VARARGS, latest_end_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernels", "The planner's innermost loops, compiled.", 0, METHODS,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&MODULE); }
