// A team of threads that runs lists of instructions.
//
// All threads share one word, `turn`: the number of the current phase and its next chunk. A thread takes a chunk by moving
// the word on with compare-and-swap; whoever finishes the last chunk of a phase opens the next one. Phase numbers only
// grow, over all runs: a thread that the system puts aside between looking at the word and taking a chunk finds it changed
// when it wakes, however much later, and has touched nothing. So nobody ever waits for a thread that is not inside a chunk.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "contention.h"
#include "program.h"

namespace samovar {

constexpr int MOST_THREADS = 1024;

using Clock = std::chrono::steady_clock;

// Memory of a team, aligned to a page, grown when a program needs more, never shrunk. Who reserves it does not touch it:
// its pages come from the memory next to the thread that uses them first.
class Scratch {
public:
    bool reserve(size_t bytes);
    uint8_t* at() const { return memory_.get(); }
    size_t size() const { return size_; }

private:
    struct Free {
        void operator()(uint8_t* memory) const;
    };
    std::unique_ptr<uint8_t, Free> memory_;
    size_t size_ = 0;
};

// Memory that a thread asks for while it waits: what it reads when the next stream begins.
struct Ahead {
    Span spans[MOST_SPANS];
    int count = 0;
    int64_t at = 0, end = 0;   // bytes of each span that were asked for, and until where

    // Asks for some more; false if there is no more.
    bool ask();
};

// One thread of a team. Seat 0 is the caller's.
struct alignas(64) Seat {
    std::atomic<uint32_t> asleep = 0;    // 1: waits until somebody makes it 0 and wakes it
    std::atomic<int> system_number = 0;  // of the thread, once it runs
    std::atomic<uint64_t> claims = 0;    // of this thread's row of chunks: taken from the front, and (high half) from the back
    Worker worker = {};
    Ahead ahead;
    Scratch scratch;
    std::thread thread;
};

// How long a thread has looked for something to do.
struct Patience {
    int looks = 0;
    Clock::time_point since = {};  // it began, or slept last
    Clock::time_point began = {};
};

class Team {
public:
    // `cpus`, if given, pins the threads but the caller's.
    Team(const Table& table, int num_threads, const int32_t* cpus);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    bool run(const SamovarInstruction* instructions, int count, const SamovarStep& step, char* error, size_t error_size);
    const char* isa() const { return table_.isa; }
    size_t num_bytes() const;

    // What happened since this was asked last. Not while the team runs.
    void report(double& waited, double& ran, int64_t& runs, int32_t& threads_in_use);

private:
    void start(const int32_t* cpus);
    void stop();
    void serve(Seat& seat);
    void run_alone();
    void run_together();
    bool take(uint64_t& word);
    void work_from(Seat& seat, size_t at, int64_t chunk, bool is_open);
    void work_on(Seat& seat, uint64_t word);
    int64_t claim(Seat& seat, int64_t chunks);
    void look_ahead(Seat& seat, const Phase& phase);
    void open(uint64_t number, int64_t chunks);
    void look_again(Seat& seat, uint64_t seen, Patience& patience);
    void sleep(Seat& seat, uint64_t seen);
    void wake(Seat& seat);
    void wake_sleepers();
    void choose_threads(Clock::time_point began, Clock::time_point ended);

    const Table& table_;
    const int num_threads_;
    std::unique_ptr<Seat[]> seats_;
    Scratch shared_;

    // Written by the caller between runs; read by threads that have taken a chunk of this run.
    Program program_;
    uint64_t first_number_ = 0;

    alignas(64) std::atomic<uint64_t> turn_;
    std::atomic<int64_t> num_chunks_ = 0;  // of the phase whose turn it is
    std::atomic<int> num_active_;          // threads that take part
    std::atomic<bool> is_over_ = false;
    alignas(64) std::atomic<int64_t> num_done_ = 0;
    alignas(64) std::atomic<int> num_asleep_ = 0;
    std::atomic_flag is_running_ = ATOMIC_FLAG_INIT;

    // The caller's own.
    Contention contention_;
    Clock::time_point window_start_ = {}, hold_until_ = {};
    double waited_ = 0, ran_ = 0;
    int64_t runs_ = 0;
};

}  // namespace samovar

struct SamovarTeam : samovar::Team {
    using samovar::Team::Team;
};
