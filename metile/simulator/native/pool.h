// Persistent workers. The thread that launches runs no fibers: it waits, and can stop a launch at any time.
#pragma once
#include <errno.h>
#include <time.h>

#include "signals.h"
#include "threadgroup.h"

namespace metile {

constexpr int kWorkers = 512;

struct Pool {
  pthread_mutex_t lock;
  pthread_cond_t wake, done;
  pid_t process;
  int started, wanted, busy;
  uint64_t generation;
  Job* job;
  pthread_t threads[kWorkers];
  Threadgroup* threadgroups[kWorkers];
};

static Pool pool;

inline void* work(void* argument) {
  const int mine = (int)(intptr_t)argument;
  Threadgroup* t = pool.threadgroups[mine];
  current_threadgroup = t;
  prepare_signals(t);
  uint64_t seen = 0;
  pthread_mutex_lock(&pool.lock);
  for (;;) {
    while (pool.generation == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    seen = pool.generation;
    if (mine >= pool.wanted) continue;
    Job* job = pool.job;
    pthread_mutex_unlock(&pool.lock);
    run_job(t, job);
    pthread_mutex_lock(&pool.lock);
    if (--pool.busy == 0) pthread_cond_broadcast(&pool.done);
  }
}

// A forked child has the memory of the pool but none of its threads.
inline void prepare_pool() {
  if (pool.process == getpid()) return;
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&pool.lock, nullptr);
  pthread_cond_init(&pool.wake, nullptr);
  pthread_cond_init(&pool.done, &monotonic);
  pool.process = getpid();
  pool.started = pool.busy = pool.wanted = 0;
}

// Returns how many workers there are: fewer than asked for where the system refuses more.
inline int start_workers(int count) {
  while (pool.started < count && pool.started < kWorkers) {
    Threadgroup*& t = pool.threadgroups[pool.started];
    if (!t) t = new_threadgroup();
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 512 << 10);
    const bool fine =
        t && !pthread_create(&pool.threads[pool.started], &attributes, work, (void*)(intptr_t)pool.started);
    pthread_attr_destroy(&attributes);
    if (!fine) break;
    pool.started++;
  }
  return pool.started < count ? pool.started : count;
}

inline bool start_job(Job* job, int workers) {
  prepare_pool();
  pthread_mutex_lock(&pool.lock);
  const int count = start_workers(workers);
  if (count) {
    take_signals();
    pool.job = job;
    pool.wanted = pool.busy = count;
    pool.generation++;
    pthread_cond_broadcast(&pool.wake);
  }
  pthread_mutex_unlock(&pool.lock);
  return count != 0;
}

inline bool wait_for_job(int milliseconds) {
  timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += milliseconds * 1000000L;
  until.tv_sec += until.tv_nsec / 1000000000L;
  until.tv_nsec %= 1000000000L;
  pthread_mutex_lock(&pool.lock);
  while (pool.busy && pthread_cond_timedwait(&pool.done, &pool.lock, &until) != ETIMEDOUT) {
  }
  const bool done = !pool.busy;
  pthread_mutex_unlock(&pool.lock);
  if (done) give_signals_back();
  return done;
}

// A worker between two threadgroups sees the flag only; so this is to be called until the job is done.
inline void stop_job() {
  pthread_mutex_lock(&pool.lock);
  if (pool.busy) {
    __atomic_store_n(&pool.job->stop, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < pool.wanted; i++) pthread_kill(pool.threads[i], stop_signal());
  }
  pthread_mutex_unlock(&pool.lock);
}

}  // namespace metile
