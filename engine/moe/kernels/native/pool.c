/* The thread pool: the caller is thread 0; a waiting thread spins for some tens of microseconds and then blocks, so that
   an oversubscribed machine gives its cores to whoever has work. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include "kernels_internal.h"

#define SPIN_NANOSECONDS 40000
#define LINE 64

typedef struct worker {
    pllm_pool *pool;
    pthread_t handle;
    int number;
    int32_t cpu;
} worker;

struct pllm_pool {
    int threads;
    pid_t process;
    worker *workers;
    void **scratch;
    size_t scratch_bytes;
    void *shared;
    size_t shared_bytes;
    pthread_mutex_t run_lock; /* one region at a time */
    pthread_mutex_t sleep_lock;
    pthread_cond_t wake;
    pllm_region region;
    void *argument;
    int ending;
    pllm_stop stop; /* NULL: nothing ends the region early */
    pthread_t asking;
    int64_t interval, asked;
    _Alignas(LINE) atomic_uint started; /* counts regions */
    _Alignas(LINE) atomic_uint passed;  /* counts barriers */
    _Alignas(LINE) atomic_int arrived;
    _Alignas(LINE) atomic_int sleepers;
    _Alignas(LINE) atomic_llong next;
    _Alignas(LINE) atomic_int stopped;
};

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Until *word is no longer `old`. */
static void wait_for_change(pllm_pool *pool, atomic_uint *word, unsigned old) {
    int64_t deadline = 0;
    for (;;) {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != old) return;
            pause_briefly();
        }
        int64_t now = nanoseconds();
        if (deadline == 0) deadline = now + SPIN_NANOSECONDS;
        if (now >= deadline) break;
    }
    pthread_mutex_lock(&pool->sleep_lock);
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(word) == old) pthread_cond_wait(&pool->wake, &pool->sleep_lock);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->sleep_lock);
}

static void change(pllm_pool *pool, atomic_uint *word) {
    atomic_fetch_add(word, 1);
    if (atomic_load(&pool->sleepers) == 0) return;
    pthread_mutex_lock(&pool->sleep_lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->sleep_lock);
}

void pllm_pool_barrier(pllm_pool *pool) {
    if (pool->threads == 1) {
        atomic_store(&pool->next, 0);
        return;
    }
    unsigned passed = atomic_load_explicit(&pool->passed, memory_order_acquire);
    if (atomic_fetch_add(&pool->arrived, 1) + 1 < pool->threads) {
        wait_for_change(pool, &pool->passed, passed);
        return;
    }
    atomic_store(&pool->arrived, 0);
    atomic_store(&pool->next, 0);
    change(pool, &pool->passed);
}

int64_t pllm_pool_next(pllm_pool *pool) {
    return atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
}

int pllm_pool_stopped(pllm_pool *pool) {
    if (!pool->stop) return 0;
    const int stopped = atomic_load_explicit(&pool->stopped, memory_order_relaxed);
    if (!stopped && pthread_equal(pthread_self(), pool->asking)) {
        const int64_t now = nanoseconds();
        if (now - pool->asked >= pool->interval) {
            pool->asked = now;
            if (!pool->stop()) return 0;
            atomic_store(&pool->stopped, 1);
            return 1;
        }
    }
    return stopped;
}

int64_t pllm_pool_take(pllm_pool *pool, int64_t total, int64_t longest, int64_t *first) {
    if (pllm_pool_stopped(pool)) return 0;
    long long taken = atomic_load_explicit(&pool->next, memory_order_relaxed);
    for (;;) {
        const int64_t left = total - taken;
        if (left <= 0) return 0;
        const int64_t share = pool->threads == 1 ? left : divided_up(left, 2 * (int64_t)pool->threads);
        const int64_t run = MIN(share, longest);
        if (!atomic_compare_exchange_weak_explicit(&pool->next, &taken, taken + run, memory_order_relaxed,
                                                   memory_order_relaxed))
            continue;
        *first = taken;
        return run;
    }
}

static void pin(int32_t cpu) {
#if defined(__linux__)
    if (cpu < 0 || cpu >= CPU_SETSIZE) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)cpu;
#endif
}

static void *work(void *argument) {
    worker *self = argument;
    pllm_pool *pool = self->pool;
    pin(self->cpu);
    for (unsigned seen = 0;; seen++) {
        wait_for_change(pool, &pool->started, seen);
        if (pool->ending) return NULL;
        pool->region(self->number, pool->threads, pool->argument);
        pllm_pool_barrier(pool);
    }
}

static void stop(pllm_pool *pool, int created) {
    pool->ending = 1;
    change(pool, &pool->started);
    for (int i = 1; i < created; i++) pthread_join(pool->workers[i].handle, NULL);
}

static void release(pllm_pool *pool) {
    for (int i = 0; pool->scratch && i < pool->threads; i++) free(pool->scratch[i]);
    free(pool->scratch);
    free(pool->shared);
    free(pool->workers);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->sleep_lock);
    pthread_mutex_destroy(&pool->run_lock);
    free(pool);
}

pllm_pool *pllm_pool_create(int threads, const int32_t *cpus) {
    if (threads < 1 || threads > 4096) return NULL;
    pllm_pool *pool = aligned_alloc(LINE, (sizeof *pool + LINE - 1) / LINE * LINE);
    if (!pool) return NULL;
    *pool = (pllm_pool){.threads = threads, .process = getpid()};
    pthread_mutex_init(&pool->run_lock, NULL);
    pthread_mutex_init(&pool->sleep_lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    pool->scratch = calloc((size_t)threads, sizeof *pool->scratch);
    if (!pool->workers || !pool->scratch) {
        release(pool);
        return NULL;
    }
    for (int i = 1; i < threads; i++) {
        pool->workers[i] = (worker){.pool = pool, .number = i, .cpu = cpus ? cpus[i] : -1};
        if (pthread_create(&pool->workers[i].handle, NULL, work, &pool->workers[i])) {
            stop(pool, i);
            release(pool);
            return NULL;
        }
    }
    return pool;
}

void pllm_pool_destroy(pllm_pool *pool) {
    if (!pool) return;
    if (pool->process == getpid()) stop(pool, pool->threads);
    release(pool);
}

int pllm_pool_threads(const pllm_pool *pool) { return pool->threads; }

/* fork() copies the pool but none of its threads, and perhaps a lock that nobody will open. */
static void adopt(pllm_pool *pool) {
    if (pool->process == getpid()) return;
    pool->process = getpid();
    pool->threads = 1;
    atomic_store(&pool->sleepers, 0);
    pthread_mutex_init(&pool->run_lock, NULL);
    pthread_mutex_init(&pool->sleep_lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
}

void pllm_pool_lock(pllm_pool *pool) {
    adopt(pool);
    pthread_mutex_lock(&pool->run_lock);
}

void pllm_pool_unlock(pllm_pool *pool) { pthread_mutex_unlock(&pool->run_lock); }

void pllm_pool_run_locked(pllm_pool *pool, pllm_region region, void *argument) {
    atomic_store(&pool->next, 0);
    if (pool->threads == 1) {
        region(0, 1, argument);
        return;
    }
    pool->region = region;
    pool->argument = argument;
    change(pool, &pool->started);
    region(0, pool->threads, argument);
    pllm_pool_barrier(pool);
}

void pllm_pool_run(pllm_pool *pool, pllm_region region, void *argument) {
    pllm_pool_lock(pool);
    pllm_pool_run_locked(pool, region, argument);
    pllm_pool_unlock(pool);
}

int pllm_pool_run_until(pllm_pool *pool, pllm_region region, void *argument, pllm_stop stop, int64_t interval) {
    pllm_pool_lock(pool);
    pool->asking = pthread_self();
    pool->interval = interval;
    pool->asked = nanoseconds();
    pool->stop = stop;
    pllm_pool_run_locked(pool, region, argument);
    const int stopped = atomic_exchange(&pool->stopped, 0);
    pool->stop = NULL;
    pllm_pool_unlock(pool);
    return stopped;
}

/* Grows *buffer; what was in it is not kept. */
static int grow(void **buffer, size_t bytes) {
    free(*buffer);
    *buffer = aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE);
    return *buffer ? PLLM_OK : PLLM_E_MEMORY;
}

int pllm_pool_reserve_locked(pllm_pool *pool, size_t bytes_per_thread, size_t shared_bytes) {
    if (bytes_per_thread > pool->scratch_bytes) {
        pool->scratch_bytes = 0;
        for (int i = 0; i < pool->threads; i++)
            if (grow(&pool->scratch[i], bytes_per_thread)) return PLLM_E_MEMORY;
        pool->scratch_bytes = bytes_per_thread;
    }
    if (shared_bytes > pool->shared_bytes) {
        pool->shared_bytes = 0;
        if (grow(&pool->shared, shared_bytes)) return PLLM_E_MEMORY;
        pool->shared_bytes = shared_bytes;
    }
    return PLLM_OK;
}

int pllm_pool_reserve(pllm_pool *pool, size_t bytes_per_thread, size_t shared_bytes) {
    pllm_pool_lock(pool);
    int result = pllm_pool_reserve_locked(pool, bytes_per_thread, shared_bytes);
    pllm_pool_unlock(pool);
    return result;
}

void *pllm_pool_scratch(pllm_pool *pool, int thread) { return pool->scratch[thread]; }
void *pllm_pool_shared(pllm_pool *pool) { return pool->shared; }

typedef struct reading {
    pllm_pool *pool;
    const char *data;
    size_t bytes;
    atomic_ullong sum;
} reading;

static void read_part(int thread, int threads, void *argument) {
    reading *job = argument;
    (void)thread;
    (void)threads;
    const size_t block = 1 << 20;
    uint64_t sum = 0;
    for (;;) {
        size_t first = (size_t)pllm_pool_next(job->pool) * block;
        if (first >= job->bytes) break;
        size_t count = (job->bytes - first < block ? job->bytes - first : block) / 32;
        const uint64_t *words = (const uint64_t *)(const void *)(job->data + first);
        uint64_t a = 0, b = 0, c = 0, d = 0;
        for (size_t i = 0; i < count; i++, words += 4) a += words[0], b += words[1], c += words[2], d += words[3];
        sum += a + b + c + d;
    }
    atomic_fetch_add(&job->sum, sum);
}

double pllm_read_seconds(pllm_pool *pool, const void *data, size_t bytes) {
    /* From the next multiple of 8, so that whole words can be read. */
    size_t skip = (size_t)(-(uintptr_t)data & 7);
    reading job = {.pool = pool, .data = (const char *)data + skip, .bytes = bytes > skip ? bytes - skip : 0};
    int64_t start = nanoseconds();
    pllm_pool_run(pool, read_part, &job);
    int64_t end = nanoseconds();
    return (double)(end - start) * 1e-9 + (atomic_load(&job.sum) == 1 ? 1e-12 : 0.0);
}
