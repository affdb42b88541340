// Threads, their waiting and waking, and the loop over phases; team.h explains the word they share.
#include "team.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "isa.h"

namespace samovar {

namespace {

// A turn: the phase's number above, the next free chunk below. CLOSED while a phase is being opened, IDLE between runs.
constexpr int CHUNK_BITS = 24;
constexpr uint64_t CHUNK_MASK = (uint64_t(1) << CHUNK_BITS) - 1;
constexpr uint64_t IDLE = CHUNK_MASK, CLOSED = CHUNK_MASK - 1;
static_assert(MOST_CHUNKS + MOST_THREADS < int64_t(CLOSED), "every thread may count once past the last chunk");

int64_t chunk_of(uint64_t word) { return int64_t(word & CHUNK_MASK); }
uint64_t number_of(uint64_t word) { return word >> CHUNK_BITS; }

// A thread without work looks again in a loop for SPIN, then sleeps: whatever it waits for has been put aside by the system,
// and an idle processor is what makes the system take it up again.
constexpr auto SPIN = std::chrono::microseconds(40);
constexpr int LOOKS_PER_CLOCK = 32;

// Of what it reads next a waiting thread asks for AHEAD_BYTES at most, which leaves room in a second-level cache, and for
// ASKED_AT_ONCE of every span between two looks.
constexpr int64_t AHEAD_BYTES = 512 << 10, ASKED_AT_ONCE = 512;

// When a team uses fewer threads than it has: threads were kept from their processors for SHARE of at least WINDOW. A busy
// neighbour takes half; up to a fifth is what the process's own other threads take.
constexpr auto WINDOW = std::chrono::milliseconds(12);
constexpr auto HOLD = std::chrono::milliseconds(100);
constexpr double SHARE = 0.35;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // waits some cycles; "yield" does nothing on most cores
#endif
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

int system_number() { return int(syscall(SYS_gettid)); }

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

void Scratch::Free::operator()(uint8_t* memory) const { std::free(memory); }

bool Scratch::reserve(size_t bytes) {
    if (bytes <= size_) return true;
    const size_t size = (bytes + 4095) / 4096 * 4096;
    memory_.reset();
    memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(4096, size)));
    size_ = memory_ ? size : 0;
    return memory_ != nullptr;
}

bool Ahead::ask() {
    if (at >= end) return false;
    for (const int64_t until = at + ASKED_AT_ONCE; at < until; at += 64)
        for (int n = 0; n < count; n++)
            if (at < spans[n].bytes) __builtin_prefetch(spans[n].from + at, 0, 2);
    return true;
}

Team::Team(const Table& table, int num_threads, const int32_t* cpus)
    : table_(table), num_threads_(num_threads), seats_(new Seat[num_threads]), turn_(IDLE), num_active_(num_threads),
      contention_(num_threads) {
    try {
        start(cpus);
    } catch (...) {
        stop();
        throw;
    }
}

Team::~Team() { stop(); }

void Team::start(const int32_t* cpus) {
    // Signals are for the threads of the program that this library is a guest of.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    struct Restore {
        sigset_t& mask;
        ~Restore() { pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
    } restore{before};
    for (short n = 1; n < num_threads_; n++) {
        Seat& seat = seats_[n];
        seat.worker.thread = n;
        seat.thread = std::thread(&Team::serve, this, std::ref(seat));
        char name[16];
        std::snprintf(name, sizeof name, "samovar-%hd", n);
        pthread_setname_np(seat.thread.native_handle(), name);
        if (cpus == nullptr || cpus[n] < 0 || cpus[n] >= CPU_SETSIZE) continue;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus[n], &set);
        pthread_setaffinity_np(seat.thread.native_handle(), sizeof set, &set);
    }
}

void Team::stop() {
    is_over_.store(true);
    for (int n = 1; n < num_threads_; n++) {
        Seat& seat = seats_[n];
        if (!seat.thread.joinable()) continue;
        seat.asleep.store(0);
        futex(seat.asleep, FUTEX_WAKE_PRIVATE, 1);
        seat.thread.join();
    }
}

// Opens phase `number`, whose chunk 0 is the opening thread's. Closed in between: nobody may see the number of an old phase
// with the chunks of the new one.
void Team::open(uint64_t number, int64_t chunks) {
    for (int n = 0; n < program_.num_threads; n++) seats_[n].claims.store(0, std::memory_order_relaxed);
    turn_.store(number << CHUNK_BITS | CLOSED, std::memory_order_relaxed);
    num_chunks_.store(chunks, std::memory_order_release);
    turn_.store(number << CHUNK_BITS | 1, std::memory_order_seq_cst);
    wake_sleepers();
}

// Takes a chunk of the current phase if there is one left; `word` is what the turn was, either way.
bool Team::take(uint64_t& word) {
    word = turn_.load(std::memory_order_acquire);
    while (chunk_of(word) < num_chunks_.load(std::memory_order_acquire))
        if (turn_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return true;
    return false;
}

// Which chunk of a stream a thread does that has taken one: the next of its own row, or another row's last. There always is
// one, for no more are taken than there are.
int64_t Team::claim(Seat& seat, int64_t chunks) {
    constexpr uint64_t FROM_BACK = uint64_t(1) << 32;
    const int threads = program_.num_threads;
    for (int n = 0;; n++) {
        const int owner = (seat.worker.thread + n) % threads;
        const int64_t first = chunks * owner / threads, end = chunks * (owner + 1) / threads;
        const uint64_t before = seats_[owner].claims.fetch_add(n == 0 ? 1 : FROM_BACK, std::memory_order_relaxed);
        const int64_t front = int64_t(before % FROM_BACK), back = int64_t(before / FROM_BACK);
        if (front + back < end - first) return n == 0 ? first + front : end - 1 - back;
    }
}

// While others are still at this phase, and so its program cannot go away: what this thread may ask for while it waits for them.
void Team::look_ahead(Seat& seat, const Phase& phase) {
    Ahead& ahead = seat.ahead;
    ahead.count = program_.spans(program_.phases[size_t(phase.next_stream)], seat.worker.thread, ahead.spans);
    ahead.at = ahead.end = 0;
    for (int n = 0; n < ahead.count; n++) ahead.end = std::max(ahead.end, ahead.spans[n].bytes);
    if (ahead.count > 0) ahead.end = std::min(ahead.end, AHEAD_BYTES / ahead.count);
}

// Runs chunk `chunk` of the run's phase `at` and all others of that phase that are left; and the next phases, as long as
// this thread is the one that finishes them. `is_open`: the phase is open and the chunk was taken.
void Team::work_from(Seat& seat, size_t at, int64_t chunk, bool is_open) {
    for (; at < program_.phases.size(); at++, chunk = 0, is_open = false) {
        const Phase phase = program_.phases[at];  // a copy: once this thread has said what it did, the next run may begin
        // The others need not hear of a phase of one chunk.
        if (!is_open && phase.chunks > 1) open(first_number_ + at, phase.chunks);
        int64_t mine = 0;
        for (seat.worker.is_first = true; chunk < phase.chunks; seat.worker.is_first = false) {
            program_.run(phase, phase.in_rows && phase.chunks > 1 ? claim(seat, phase.chunks) : chunk, seat.worker);
            mine++;
            // The phase cannot end before this thread has said what it did, so the turn can be moved on blindly.
            chunk = phase.chunks == 1 ? 1 : chunk_of(turn_.fetch_add(1, std::memory_order_acq_rel));
        }
        if (phase.chunks == 1) continue;
        if (phase.next_stream >= 0 && num_done_.load(std::memory_order_relaxed) + mine < phase.chunks) look_ahead(seat, phase);
        if (num_done_.fetch_add(mine, std::memory_order_acq_rel) + mine < phase.chunks) return;
        num_done_.store(0, std::memory_order_relaxed);
    }
    turn_.store((first_number_ + at) << CHUNK_BITS | IDLE, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst)) wake(seats_[0]);
}

void Team::work_on(Seat& seat, uint64_t word) {
    work_from(seat, size_t(number_of(word) - first_number_), chunk_of(word), true);
}

void Team::wake(Seat& seat) {
    if (seat.asleep.load(std::memory_order_seq_cst) && seat.asleep.exchange(0)) futex(seat.asleep, FUTEX_WAKE_PRIVATE, 1);
}

void Team::wake_sleepers() {
    if (num_asleep_.load(std::memory_order_seq_cst) == 0) return;
    const int active = num_active_.load(std::memory_order_relaxed);
    for (int n = 0; n < active; n++) wake(seats_[n]);
}

// Sleeps until a phase is opened or the run ends, unless that has happened since the turn was `seen`. Whoever opens looks
// for sleepers afterwards, so one of the two sees the other.
void Team::sleep(Seat& seat, uint64_t seen) {
    num_asleep_.fetch_add(1);
    seat.asleep.store(1);
    const uint64_t now = turn_.load();
    const bool is_same = number_of(now) == number_of(seen) && chunk_of(now) >= num_chunks_.load();
    if (is_same && !is_over_.load())
        while (seat.asleep.load(std::memory_order_acquire)) futex(seat.asleep, FUTEX_WAIT_PRIVATE, 1);
    seat.asleep.store(0);
    num_asleep_.fetch_sub(1);
}

// Between two looks at the turn, which was `seen` and had nothing to do.
void Team::look_again(Seat& seat, uint64_t seen, Patience& patience) {
    if (!seat.ahead.ask()) pause();
    if (++patience.looks % LOOKS_PER_CLOCK) return;
    const Clock::time_point now = Clock::now();
    if (patience.looks == LOOKS_PER_CLOCK) {
        patience.since = now;
        if (patience.began == Clock::time_point{}) patience.began = now;
    } else if (now - patience.since > SPIN) {
        sleep(seat, seen);
        patience.looks = 0;
    }
}

void Team::serve(Seat& seat) {
    if (table_.enter) table_.enter();
    seat.system_number.store(system_number(), std::memory_order_relaxed);
    Patience patience;
    while (!is_over_.load(std::memory_order_relaxed)) {
        uint64_t word = turn_.load(std::memory_order_acquire);
        if (seat.worker.thread < num_active_.load(std::memory_order_relaxed) && take(word)) {
            work_on(seat, word);
            patience = {};
        } else {
            look_again(seat, word, patience);
        }
    }
}

void Team::run_alone() {
    Worker& worker = seats_[0].worker;
    for (const Phase& phase : program_.phases) {
        worker.is_first = true;
        for (int64_t chunk = 0; chunk < phase.chunks; chunk++, worker.is_first = false) program_.run(phase, chunk, worker);
    }
}

void Team::run_together() {
    // Numbers continue behind those of the last run, so that no thread can mistake one for the other.
    first_number_ = number_of(turn_.load(std::memory_order_relaxed)) + 1;
    const uint64_t end = (first_number_ + program_.phases.size()) << CHUNK_BITS | IDLE;
    work_from(seats_[0], 0, 0, false);
    Patience patience;
    for (;;) {
        uint64_t word;
        if (take(word)) {
            work_on(seats_[0], word);
        } else if (word != end) {
            look_again(seats_[0], word, patience);
            continue;
        }
        if (patience.began != Clock::time_point{}) waited_ += seconds(Clock::now() - patience.began);
        patience = {};
        if (word == end) return;
    }
}

// A thread that shares its processor with another process holds up the team for a time slice of the system, again and
// again. The team is faster without it then; from time to time it tries with all its threads.
void Team::choose_threads(Clock::time_point began, Clock::time_point ended) {
    if (window_start_ == Clock::time_point{}) {
        window_start_ = began;
        for (int n = 0; n < num_threads_; n++)
            contention_.watch(n, n == 0 ? system_number() : seats_[n].system_number.load(std::memory_order_relaxed));
        contention_.count_delayed(1, 1);
        return;
    }
    if (ended - window_start_ < WINDOW) return;
    const int active = num_active_.load(std::memory_order_relaxed);
    const int delayed = contention_.count_delayed(seconds(ended - window_start_), SHARE);
    window_start_ = {};
    if (delayed > 0 && active > 1) {
        num_active_.store(std::max(1, active - delayed), std::memory_order_relaxed);
        hold_until_ = ended + HOLD;
    } else if (active < num_threads_ && ended > hold_until_) {
        num_active_.store(num_threads_, std::memory_order_relaxed);
    }
}

bool Team::run(const SamovarInstruction* instructions, int count, const SamovarStep& step, char* error,
               size_t error_size) {
    if (is_running_.test_and_set(std::memory_order_acquire))
        return refuse(error, error_size, "the team is running already; give each thread that runs steps a team of its own");
    struct Release {
        std::atomic_flag& flag;
        ~Release() { flag.clear(std::memory_order_release); }
    } release{is_running_};
    const Clock::time_point began = Clock::now();
    const int active = num_active_.load(std::memory_order_relaxed);
    program_.table = &table_;
    program_.instructions = instructions;
    program_.count = count;
    program_.step = &step;
    program_.num_threads = active;
    if (!program_.prepare(error, error_size)) return false;
    bool is_enough = shared_.reserve(program_.shared_bytes);
    for (int n = 0; n < active; n++) {
        is_enough = is_enough && seats_[n].scratch.reserve(program_.thread_bytes);
        seats_[n].worker.scratch = seats_[n].scratch.at();
    }
    if (!is_enough)
        return refuse(error, error_size, "no memory for %zu bytes that the threads share and %zu bytes for each of %d",
                      program_.shared_bytes, program_.thread_bytes, active);
    program_.shared = shared_.at();
    if (table_.enter) table_.enter();  // another library may have changed what this thread had
    if (active == 1) run_alone();
    else run_together();
    const Clock::time_point ended = Clock::now();
    ran_ += seconds(ended - began);
    runs_++;
    if (num_threads_ > 1) choose_threads(began, ended);
    return true;
}

size_t Team::num_bytes() const {
    size_t total = shared_.size();
    for (int n = 0; n < num_threads_; n++) total += seats_[n].scratch.size();
    return total;
}

void Team::report(double& waited, double& ran, int64_t& runs, int32_t& threads_in_use) {
    waited = waited_;
    ran = ran_;
    runs = runs_;
    threads_in_use = num_active_.load(std::memory_order_relaxed);
    waited_ = ran_ = 0;
    runs_ = 0;
}

}  // namespace samovar

using samovar::refuse;

SamovarTeam* samovar_team_create(int32_t num_threads, const int32_t* cpus, const char* isa, char* error,
                                 size_t error_size) {
    if (num_threads < 1 || num_threads > samovar::MOST_THREADS) {
        refuse(error, error_size, "num_threads is %d; a team has 1 to %d threads", num_threads, samovar::MOST_THREADS);
        return nullptr;
    }
    const samovar::InstructionSet* set = samovar::find_set(isa);
    if (set == nullptr || set->table == nullptr || !set->is_usable()) {
        const char* why = set == nullptr ? "is unknown" : set->table == nullptr ? "is not compiled" : "cannot run here";
        refuse(error, error_size, "instruction set %s %s; there are: %s", isa, why, samovar_compiled_isas());
        return nullptr;
    }
    try {
        return new SamovarTeam(*set->table(), num_threads, cpus);
    } catch (const std::exception& problem) {
        refuse(error, error_size, "a team of %d threads cannot be started: %s", num_threads, problem.what());
        return nullptr;
    }
}

void samovar_team_destroy(SamovarTeam* team) { delete team; }

const char* samovar_team_isa(const SamovarTeam* team) { return team->isa(); }

int32_t samovar_run(SamovarTeam* team, const SamovarInstruction* instructions, int32_t count, const SamovarStep* step,
                    char* error, size_t error_size) {
    return team->run(instructions, count, *step, error, error_size) ? 0 : 1;
}

// Nothing to wait for: a thread that has no chunk of a run looks at nothing but the team's own words.
void samovar_forget(SamovarTeam*) {}

void samovar_team_report(SamovarTeam* team, double* waited, double* ran, int64_t* runs, int32_t* threads_in_use) {
    team->report(*waited, *ran, *runs, *threads_in_use);
}

int64_t samovar_team_bytes(const SamovarTeam* team) { return int64_t(team->num_bytes()); }
