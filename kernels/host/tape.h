// A tape: the launches of a whole step, run by one call. Part of cpu_pool.cpp.
//
// Between two steps change the arrays that come from outside and the numbers that count tokens. Arrays from outside are
// looked at anew in every step, so that a tape never reads memory that an array has left; all others are the tape's own.
#pragma once

extern "C" {
void* PyObject_Type(void* object);  // a new reference
void Py_DecRef(void* object);
int PyDict_Next(void* dict, int64_t* place, void** key, void** value);
int64_t PyList_Size(void* list);
void* PyList_GetItem(void* list, int64_t index);
}

namespace {

enum Seen { kWhole, kToken, kTokens };                     // what a slot sees of an array from outside
constexpr int kChanged = 1000000, kNotOwned = 2000000, kNoMemory = -1;
constexpr int64_t kOwnMemory = -1, kOutput = -2;           // sources of a slot that are not from outside

struct External {
  int64_t cached;    // whether it is a cache [B, H, room, D], one of those that the caller names the memory of
  int64_t itemsize;
  Array expected;    // with any memory; a cache has room of its own
};

struct Slot {
  int64_t source, seen;
};

struct TapeLaunch {
  Entry entry;
  int64_t (*scratch)(const int64_t* numbers);
  int64_t groups, first, count;  // its slots
  int64_t moving;                // bit i: number i grows with the tokens in the cache; it stands here less their number
  int64_t numbers[16];
};

struct Tape {
  const TapeLaunch* launches;
  Array* arrays;  // one a slot
  const Slot* slots;
  const External* externals;
  Array* bound;   // one an external array
  int64_t launch_count, slot_count, external_count;
  OutputSpec output;
};

bool as_expected(const PyBuffer& view, const External& external, int64_t tokens) {
  const Array& expected = external.expected;
  if (view.ndim != expected.ndim || view.itemsize != external.itemsize || !rows_are_whole(view)) return false;
  for (int d = 0; d < view.ndim; ++d) {
    if (external.cached && d == 2 ? view.shape[d] <= tokens : view.shape[d] != expected.shape[d]) return false;
    if (!external.cached && view.strides[d] != expected.strides[d]) return false;
  }
  return true;
}

// Look at the arrays from outside. Returns 0, or what metile_tape_run returns.
int bind_externals(const Tape& tape, void** objects, void** owned, int64_t tokens) {
  for (int i = 0; i < tape.external_count; ++i) {
    const External& external = tape.externals[i];
    PyBuffer view;
    if (PyObject_GetBuffer(objects[i], &view, kStrides) != 0) return 1 + i;
    const bool good = as_expected(view, external, tokens);
    if (good) tape.bound[i] = describe(view);
    PyBuffer_Release(&view);
    if (!external.cached && !good) return kChanged + i;
    if (external.cached && (!good || tape.bound[i].data != *owned++)) return kNotOwned;
  }
  return 0;
}

Array seen(const Array& whole, int64_t seen, int64_t tokens) {
  Array array = whole;
  if (seen == kToken) array.data = static_cast<char*>(array.data) + tokens * array.strides[2], array.shape[2] = 1;
  if (seen == kTokens) array.shape[2] = tokens + 1;
  return array;
}

// Let idle workers fetch what a launch will read, of the arrays that were registered for it.
void want(const Tape& tape, const TapeLaunch& launch) {
  Registered wanted = {};
  int count = 0;
  for (int64_t i = launch.first; i < launch.first + launch.count && count < kTogether; ++i) {
    const Array& array = tape.arrays[i];
    if (tape.slots[i].source < 0 || tape.slots[i].seen != kWhole || !registered(array.data, false)) continue;
    wanted.next[count++] = Region{static_cast<const char*>(array.data), array.shape[0] * array.strides[0]};
  }
  if (count > 0) want_next(&wanted);
}

void play(const Tape& tape, int64_t tokens) {
  begin_launching();
  for (int64_t i = 0; i < tape.launch_count; ++i) {
    const TapeLaunch& launch = tape.launches[i];
    int64_t numbers[16];
    for (int n = 0; n < 16; ++n) numbers[n] = launch.numbers[n] + (launch.moving >> n & 1 ? tokens : 0);
    want(tape, tape.launches[(i + 1) % tape.launch_count]);
    run_next(Job{launch.entry, tape.arrays + launch.first, numbers, static_cast<uint32_t>(launch.groups),
                 launch.scratch(numbers)});
  }
  pthread_mutex_unlock(&pool.launching);
}

}  // namespace

extern "C" {

// Describe an array as a tape expects it from then on; returns 0, or -1 where the object has no buffer or too many axes.
int metile_describe(void* object, External* external) {
  PyBuffer view;
  if (PyObject_GetBuffer(object, &view, kStrides) != 0) return -1;
  const bool fits = view.ndim <= kMaxDims;
  if (fits) external->expected = describe(view), external->itemsize = view.itemsize;
  PyBuffer_Release(&view);
  return fits ? 0 : -1;
}

// Run a tape where `tokens` are in the cache, which get one more. `objects` are the arrays from outside; `owned` is the
// memory that those among them that are caches must have; `capsules`, a list, receives the output.
//
// Returns 0; or 1 + the index of an array that gave no buffer (a Python error is then set); or kChanged + the index of
// one that is laid out otherwise; or kNotOwned for a cache that is, that has other memory or no room; or kNoMemory.
// Nothing was written where it does not return 0.
int metile_tape_run(const Tape* tape, void** objects, void** owned, int64_t tokens, void* capsules) {
  const int status = bind_externals(*tape, objects, owned, tokens);
  if (status != 0) return status;
  Array made;
  Output* output = new_output(tape->output, &made);
  if (output == nullptr) return kNoMemory;
  for (int64_t i = 0; i < tape->slot_count; ++i) {
    const Slot& slot = tape->slots[i];
    if (slot.source >= 0) tape->arrays[i] = seen(tape->bound[slot.source], slot.seen, tokens);
    if (slot.source == kOutput) tape->arrays[i] = made;
  }
  void* state = PyEval_SaveThread();
  play(*tape, tokens);
  PyEval_RestoreThread(state);
  give(output, capsules, 0);
  return 0;
}

// Whether containers hold the very objects that they held: `dicts`, then `lists`, each a list of containers; `kinds`,
// the class of each; `held`, the values of all dicts, then the items of all lists.
int metile_unchanged(void* dicts, void* lists, void* kinds, void* held) {
  const int64_t dict_count = PyList_Size(dicts), list_count = PyList_Size(lists), count = PyList_Size(held);
  int64_t at = 0;
  for (int64_t i = 0; i < dict_count + list_count; ++i) {
    void* container = i < dict_count ? PyList_GetItem(dicts, i) : PyList_GetItem(lists, i - dict_count);
    void* kind = PyObject_Type(container);
    Py_DecRef(kind);
    if (kind != PyList_GetItem(kinds, i)) return 0;
    if (i < dict_count) {
      void *key, *value;
      for (int64_t place = 0; PyDict_Next(container, &place, &key, &value); ++at)
        if (at >= count || PyList_GetItem(held, at) != value) return 0;
      continue;
    }
    const int64_t size = PyList_Size(container);
    for (int64_t item = 0; item < size; ++item, ++at)
      if (at >= count || PyList_GetItem(held, at) != PyList_GetItem(container, item)) return 0;
  }
  return at == count;
}

}  // extern "C"
