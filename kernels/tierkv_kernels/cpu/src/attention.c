/* Attention over paged keys and values: cuts the records into units, and has the pool work them off.
 *
 * How a record is cut along its keys depends on the record alone, and states merge in the order of
 * their keys: so a result does not depend on the batch, nor on how many threads there are. */
#include "attention.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "few_rows.h"
#include "level.h"
#include "many_rows.h"
#include "pool.h"

#define CHUNK_TOKENS 512
/* Of a record with few rows: one unit's keys lie between two multiples of this. */
#define UNITS_PER_THREAD 4
/* Heads go to units of their own where there are fewer units than this. */
#define BYTES_PER_THREAD (128 << 10)
/* Of keys and values: a thread is not woken for less. */

/* How one record is cut. */
struct cut {
    int32_t chunks, row_tiles;
    int64_t first_unit, state; /* row of its first state; -1: none */
    bool few;
};

/* A thread's units: those from ``first`` on that lie next to each other, of which others may take the
 * last ones when they have none left. The first in the low half, the end in the high half. */
struct share {
    _Alignas(64) atomic_ullong range;
};

struct job {
    struct task task;
    const struct cut *cuts;
    struct unit *units;
    int64_t num_units;
    const int32_t *record_of_partial;
    char *memory;
    size_t memory_per_thread;
    struct share *shares; /* [threads] */
    int threads;
    atomic_llong next_merge;
};

static int64_t up_to_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static bool is_few(const struct attention *call, const struct record *record) {
    return (int64_t)record->n_tok * call->group <= FEW_ROWS_MAX;
}

/* Units along the keys. */
static int32_t chunks_of(const struct attention *call, const struct record *record) {
    if (!is_few(call, record) || record->kv_end <= record->kv_begin) return 1;
    return (record->kv_end - 1) / CHUNK_TOKENS - record->kv_begin / CHUNK_TOKENS + 1;
}

/* Fills ``cuts``; returns the number of units where all KV heads are in one unit if they can be. */
static int64_t cut_records(const struct attention *call, struct cut *cuts, int64_t *num_states) {
    int64_t units = 0;
    *num_states = 0;
    for (int64_t i = 0; i < call->num_records; i++) {
        const struct record *record = call->records + i;
        struct cut *cut = cuts + i;
        int64_t rows = (int64_t)record->n_tok * call->group;
        cut->few = is_few(call, record);
        cut->chunks = chunks_of(call, record);
        cut->row_tiles = cut->few ? rows > 0 : (int32_t)((rows + ROW_TILE - 1) / ROW_TILE);
        bool states = record->part >= 0 || cut->chunks > 1;
        cut->state = states ? *num_states : -1;
        if (states) *num_states += (int64_t)record->n_tok * cut->chunks;
        units += (int64_t)cut->chunks * cut->row_tiles * (cut->few ? 1 : call->kv_heads);
    }
    return units;
}

static int64_t add_units(
    const struct attention *call, const struct record *record, const struct cut *cut, int heads,
    struct unit *units
) {
    int64_t count = 0;
    int32_t rows = record->n_tok * call->group;
    int32_t height = cut->few ? rows : ROW_TILE;
    for (int32_t chunk = 0; chunk < cut->chunks; chunk++) {
        int64_t first = ((int64_t)record->kv_begin / CHUNK_TOKENS + chunk) * CHUNK_TOKENS;
        int64_t end = first + CHUNK_TOKENS;
        for (int32_t tile = 0; tile < cut->row_tiles; tile++) {
            for (int32_t head = 0; head < call->kv_heads; head += heads) {
                int32_t row = tile * height;
                units[count++] = (struct unit){
                    .record = record,
                    .first_row = row,
                    .rows = rows - row < height ? rows - row : height,
                    .first_head = head,
                    .heads = call->kv_heads - head < heads ? call->kv_heads - head : heads,
                    .kv_begin = chunk == 0 ? record->kv_begin : (int32_t)first,
                    .kv_end = chunk == cut->chunks - 1 ? record->kv_end : (int32_t)end,
                    .state = cut->state < 0 ? -1 : cut->state + (int64_t)chunk * record->n_tok,
                };
            }
        }
    }
    return count;
}

/* ---- Merging ---- */

/* A token's states, one after another. */
struct merge {
    const struct task *task;
    int64_t q_head;
    float *sum; /* [head_dim] */
    float largest, weight;
};

static void merge_state(struct merge *merge, int64_t state, bool only_largest) {
    const struct attention *call = merge->task->call;
    const struct states *states = &merge->task->states;
    int64_t at = state * call->kv_heads * call->group + merge->q_head;
    float largest = states->largest[at];
    if (only_largest) {
        if (largest > merge->largest || largest != largest) merge->largest = largest;
        return;
    }
    if (largest == -INFINITY && !(states->weight[at] != 0)) return;
    float factor = exp2f(largest - merge->largest);
    merge->weight += states->weight[at] * factor;
    const float *sum = states->sum + at * call->head_dim;
    for (int d = 0; d < call->head_dim; d++) merge->sum[d] += sum[d] * factor;
}

static void merge_record(
    struct merge *merge, const struct job *job, int64_t record, int64_t token, bool only_largest
) {
    const struct cut *cut = job->cuts + record;
    for (int32_t chunk = 0; chunk < cut->chunks; chunk++) {
        int64_t first = cut->state + (int64_t)chunk * job->task.call->records[record].n_tok;
        merge_state(merge, first + token, only_largest);
    }
}

/* The states of partial row ``row``. */
static void merge_partial(
    struct merge *merge, const struct job *job, int32_t row, bool only_largest
) {
    int32_t record = job->record_of_partial[row];
    int64_t token = row - job->task.call->records[record].part;
    merge_record(merge, job, record, token, only_largest);
}

/* Merge number ``n``: first those of the plan, then the tokens of records that were cut only here. */
static void merge_token(const struct job *job, int64_t record, int64_t n, float *sum) {
    const struct attention *call = job->task.call;
    int64_t q_heads = (int64_t)call->kv_heads * call->group;
    for (int64_t q_head = 0; q_head < q_heads; q_head++) {
        struct merge merge = {&job->task, q_head, sum, -INFINITY, 0};
        memset(sum, 0, sizeof *sum * (size_t)call->head_dim);
        int64_t token = record < 0 ? call->merge_tokens[n] : call->records[record].q_tok + n;
        for (int only_largest = 1; only_largest >= 0; only_largest--) {
            if (record >= 0) merge_record(&merge, job, record, n, only_largest);
            else
                for (int32_t i = call->merge_indptr[n]; i < call->merge_indptr[n + 1]; i++)
                    merge_partial(&merge, job, call->merge_rows[i], only_largest);
        }
        put_output(call, token, q_head, sum, merge.largest, merge.weight);
    }
}

static void merge_share(void *argument, int thread) {
    struct job *job = argument;
    const struct attention *call = job->task.call;
    float *sum = (float *)(job->memory + (size_t)thread * job->memory_per_thread);
    for (;;) {
        int64_t n = atomic_fetch_add(&job->next_merge, 1);
        if (n < call->num_merges) {
            merge_token(job, -1, n, sum);
            continue;
        }
        int64_t record = n - call->num_merges;
        if (record >= call->num_records) return;
        if (call->records[record].part >= 0 || job->cuts[record].state < 0) continue;
        for (int32_t token = 0; token < call->records[record].n_tok; token++)
            merge_token(job, record, token, sum);
    }
}

/* ---- A call ---- */

static int64_t first_of(unsigned long long range) { return (int64_t)(range & UINT32_MAX); }
static int64_t end_of(unsigned long long range) { return (int64_t)(range >> 32); }

/* Take the first or the last unit of a share; -1: there is none. */
static int64_t take_unit(struct share *share, bool last) {
    unsigned long long range = atomic_load(&share->range), less;
    do {
        if (first_of(range) == end_of(range)) return -1;
        less = last ? range - (1ull << 32) : range + 1;
    } while (!atomic_compare_exchange_weak(&share->range, &range, less));
    return last ? end_of(range) - 1 : first_of(range);
}

static int64_t next_unit(struct job *job, int thread) {
    int64_t unit = take_unit(job->shares + thread, false);
    for (int i = 1; unit < 0 && i < job->threads; i++)
        unit = take_unit(job->shares + (thread + i) % job->threads, true);
    return unit;
}

/* The unit that this thread will most likely do next; NULL: not known. */
static const struct unit *unit_after(struct job *job, int thread) {
    unsigned long long range = atomic_load(&job->shares[thread].range);
    if (first_of(range) == end_of(range)) return NULL;
    const struct unit *unit = job->units + first_of(range);
    return is_few(job->task.call, unit->record) ? unit : NULL;
}

static void unit_share(void *argument, int thread) {
    struct job *job = argument;
    char *memory = job->memory + (size_t)thread * job->memory_per_thread;
    for (int64_t n; (n = next_unit(job, thread)) >= 0;) {
        const struct unit *unit = job->units + n;
        if (is_few(job->task.call, unit->record))
            few_rows(&job->task, unit, unit_after(job, thread), memory);
        else many_rows(&job->task, unit, memory);
    }
}

static int threads_for(const struct attention *call, const struct pool *pool) {
    int64_t bytes = 0;
    int64_t per_token = 2 * call->kv_heads * call->head_dim * bytes_of(call->kv_type);
    for (int64_t i = 0; i < call->num_records; i++) {
        const struct record *record = call->records + i;
        int64_t times = ((int64_t)record->n_tok * call->group + 7) / 8;
        bytes += (record->kv_end - record->kv_begin) * per_token * times;
    }
    int64_t wanted = bytes / BYTES_PER_THREAD;
    int threads = pool_threads(pool);
    return wanted < 1 ? 1 : wanted < threads ? (int)wanted : threads;
}

static bool table_is_good(const struct attention *call) {
    for (int64_t i = 0; i < call->num_sequences; i++) {
        const int32_t *row = call->block_table + i * call->table_stride;
        int64_t blocks = ((int64_t)call->seq_lens[i] + call->block_size - 1) / call->block_size;
        bool bad = false;
        for (int64_t n = 0; n < blocks; n++) bad |= row[n] < 0 || row[n] >= call->num_blocks;
        if (bad) return false;
    }
    return true;
}

/* Laid out one after another in the pool's memory. */
static char *take(char **memory, int64_t bytes) {
    char *at = *memory;
    *memory += up_to_line(bytes);
    return at;
}

static enum result run(struct pool *pool, const struct attention *call) {
    int64_t num_records = call->num_records, num_states;
    struct cut *cuts = malloc(sizeof *cuts * (size_t)(num_records + 1));
    if (cuts == NULL) return NO_MEMORY;
    int64_t num_units = cut_records(call, cuts, &num_states);
    int threads = threads_for(call, pool);
    int heads = call->kv_heads;
    if (threads > 1 && num_units < threads * UNITS_PER_THREAD)
        heads = (int)(heads * num_units / (threads * UNITS_PER_THREAD));
    if (heads < 1) heads = 1;
    int64_t head_units = (call->kv_heads + heads - 1) / heads;

    size_t per_thread = many_rows_memory(call);
    for (int64_t i = 0; i < num_records; i++) {
        struct unit unit = {.rows = call->records[i].n_tok * call->group, .heads = heads};
        if (!cuts[i].few) continue;
        size_t bytes = few_rows_memory(call, &unit);
        if (bytes > per_thread) per_thread = bytes;
    }
    per_thread = (size_t)up_to_line((int64_t)per_thread) + 4096; /* no two threads on a page */

    int64_t rows = num_states * call->kv_heads * call->group;
    int64_t bytes = up_to_line((int64_t)sizeof(struct unit) * num_units * head_units) +
                    up_to_line(4 * call->num_partials) + up_to_line(4 * rows * call->head_dim) +
                    2 * up_to_line(4 * rows) +
                    ((int64_t)per_thread + (int64_t)sizeof(struct share)) * threads;
    char *memory = pool_memory(pool, (size_t)bytes);
    if (memory == NULL) {
        free(cuts);
        return NO_MEMORY;
    }
    struct job job = {.task = {.call = call}, .cuts = cuts, .memory_per_thread = per_thread};
    job.threads = threads;
    job.shares = (struct share *)take(&memory, (int64_t)sizeof(struct share) * threads);
    job.memory = take(&memory, (int64_t)per_thread * threads);
    job.task.states.sum = (float *)take(&memory, 4 * rows * call->head_dim);
    job.task.states.largest = (float *)take(&memory, 4 * rows);
    job.task.states.weight = (float *)take(&memory, 4 * rows);
    int32_t *record_of_partial = (int32_t *)take(&memory, 4 * call->num_partials);
    job.units = (struct unit *)memory;
    for (int64_t i = 0; i < num_records; i++) {
        const struct record *record = call->records + i;
        job.num_units += add_units(
            call, record, cuts + i, cuts[i].few ? heads : 1, job.units + job.num_units
        );
        if (record->part >= 0)
            for (int32_t t = 0; t < record->n_tok; t++)
                record_of_partial[record->part + t] = (int32_t)i;
    }
    job.record_of_partial = record_of_partial;
    for (int64_t i = 0; i < threads; i++) {
        uint64_t first = (uint64_t)(job.num_units * i / threads);
        uint64_t end = (uint64_t)(job.num_units * (i + 1) / threads);
        atomic_init(&job.shares[i].range, first | end << 32);
    }
    pool_run(pool, threads, unit_share, &job);
    if (num_states > 0) pool_run(pool, threads, merge_share, &job);
    free(cuts);
    return DONE;
}

/* BAD_TABLE: an entry that is needed names no block; nothing was computed. */
EXPORT int OF_LEVEL(tierkv_attention)(struct pool *pool, const struct attention *call) {
    if (!table_is_good(call)) return BAD_TABLE;
    pool_lock(pool);
    enum result result = run(pool, call);
    pool_unlock(pool);
    return (int)result;
}
