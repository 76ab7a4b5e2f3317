// Faults of kernels. A signal on a fiber's stack ends its threadgroup; any other goes to the handler that was there.
#pragma once
#include <ucontext.h>

#include "faults.h"

namespace metile {

constexpr int kFaultSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
constexpr uint64_t kUnknownAddress = ~0ul;
constexpr uint64_t kSignalStackBytes = 64 << 10;

static struct sigaction previous_actions[64];

inline int stop_signal() { return SIGRTMIN + 6; }

inline FaultKind fault_kind(int signal, const Threadgroup* t, uint64_t address) {
  if (signal == stop_signal()) return kStopped;
  if (signal == SIGFPE) return kArithmetic;
  if (signal == SIGILL || signal == SIGTRAP) return kTrap;
  if (on_fiber(t, address) && (address - (uint64_t)t->stacks) % kStackBytes < kPage) return kStackOverflow;
  return kBadAccess;
}

// Back to the handler that was there: the instruction runs again and faults into it; a sent signal is sent again.
inline void hand_on(int signal, const siginfo_t* info) {
  sigaction(signal, &previous_actions[signal], nullptr);
  if (info->si_code <= 0) raise(signal);
}

inline void on_signal(int signal, siginfo_t* info, void* context) {
  Threadgroup* t = self();
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint64_t pointer = registers[REG_RSP], instruction = registers[REG_RIP];
  const bool stopping = signal == stop_signal();
  if (!t || !on_fiber(t, pointer)) {
    if (!stopping) hand_on(signal, info);
    return;
  }
  if (stopping && !(t->job && __atomic_load_n(&t->job->stop, __ATOMIC_ACQUIRE))) return;
  if (!stopping && info->si_code <= 0) return hand_on(signal, info);
  Fault fault = {};
  fault.address = info->si_code == SI_KERNEL ? kUnknownAddress : (uint64_t)info->si_addr;
  fault.kind = fault_kind(signal, t, fault.address);
  fault.signal = signal;
  const bool lost = fault.kind == kStackOverflow && (pointer - (uint64_t)t->stacks) % kStackBytes < kPage;
  fault.site = in_image(t->job, instruction) ? instruction + 1 : lost ? 0 : kernel_site(t, pointer);
  record(t, fault);
  registers[REG_RSP] = registers[REG_RDI] = (greg_t)t->worker_stack;
  registers[REG_RIP] = (greg_t)metile_resume;
}

// Only while a launch runs: whoever installs a handler between launches finds it in place.
inline void take_signals() {
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : kFaultSignals) sigaction(signal, &action, &previous_actions[signal]);
  sigaction(stop_signal(), &action, &previous_actions[stop_signal()]);
}

inline void give_signals_back() {
  for (int signal : kFaultSignals) sigaction(signal, &previous_actions[signal], nullptr);
  sigaction(stop_signal(), &previous_actions[stop_signal()], nullptr);
}

// Of a worker: its own stack for handlers (a fiber's may be used up), and no signals that are meant for others.
inline void prepare_signals(Threadgroup* t) {
  stack_t stack = {};
  stack.ss_sp = t->signal_stack;
  stack.ss_size = kSignalStackBytes;
  sigaltstack(&stack, nullptr);
  sigset_t blocked;
  sigfillset(&blocked);
  for (int signal : kFaultSignals) sigdelset(&blocked, signal);
  sigdelset(&blocked, stop_signal());
  pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
}

}  // namespace metile
