/* Mapped files that become unreadable while they are in use: shortened by another program, or on a failing disk.

   Touching such a page is a SIGBUS, which ends the process. For registered ranges the page is replaced with zeros and
   counted instead. Who reads the range asks for the count afterwards, and throws away what was computed. Every other
   SIGBUS goes to whoever handled it before. */
#define _DEFAULT_SOURCE
#define _DARWIN_C_SOURCE

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "privatellm_kernels.h"

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif

#define RANGES 4096

/* In use where `bytes` is not 0; `start` is written first, and kept until `bytes` is 0 again. */
typedef struct range {
    _Atomic uintptr_t start;
    _Atomic size_t bytes;
    _Atomic int64_t faults;
} range;

static range table[RANGES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before;
static uintptr_t page_size;
static int installed;

static range *holder(uintptr_t address) {
    for (int i = 0; i < RANGES; ++i) {
        size_t bytes = atomic_load(&table[i].bytes);
        uintptr_t start = atomic_load(&table[i].start);
        if (bytes && address >= start && address - start < bytes) return &table[i];
    }
    return NULL;
}

/* Not a fault: another process, or this one, asked for the signal. It has no address. */
static int was_sent(const siginfo_t *information) {
    return information->si_code <= 0 || information->si_code == SI_USER;
}

/* What would have happened without this handler, which stays where it is if the process lives on. */
static void pass_on(int number, siginfo_t *information, void *context) {
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, information, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else if (before.sa_handler == SIG_DFL || !was_sent(information)) {
        /* A fault comes again when this returns, and ends the process; what was sent has to be sent again. */
        sigaction(number, &before, NULL);
        if (was_sent(information)) raise(number);
    }
}

/* Only what is safe in a signal handler: atomics and system calls. */
static void on_bus_error(int number, siginfo_t *information, void *context) {
    const int error = errno;
    const uintptr_t address = (uintptr_t)information->si_addr;
    range *found = was_sent(information) ? NULL : holder(address);
    if (found) {
        void *page = (void *)(address / page_size * page_size);
        if (mmap(page, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page) {
            atomic_fetch_add(&found->faults, 1);
            errno = error;
            return;
        }
    }
    pass_on(number, information, context);
    errno = error;
}

int pllm_guard_add(const void *start, size_t bytes) {
    int place = PLLM_E_MEMORY;
    if (!bytes) return PLLM_E_ARGUMENT;
    pthread_mutex_lock(&lock);
    if (!installed) {
        struct sigaction action = {0};
        page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
        action.sa_sigaction = on_bus_error;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        if (sigaction(SIGBUS, &action, &before)) {
            pthread_mutex_unlock(&lock);
            return PLLM_E_SET;
        }
        installed = 1;
    }
    for (int i = 0; i < RANGES; ++i) {
        if (atomic_load(&table[i].bytes)) continue;
        atomic_store(&table[i].start, (uintptr_t)start);
        atomic_store(&table[i].faults, 0);
        atomic_store(&table[i].bytes, bytes);
        place = i;
        break;
    }
    pthread_mutex_unlock(&lock);
    return place;
}

int64_t pllm_guard_faults(int place) {
    return place < 0 || place >= RANGES ? 0 : atomic_load(&table[place].faults);
}

void pllm_guard_remove(int place) {
    if (place < 0 || place >= RANGES) return;
    pthread_mutex_lock(&lock);
    atomic_store(&table[place].bytes, 0);
    pthread_mutex_unlock(&lock);
}
