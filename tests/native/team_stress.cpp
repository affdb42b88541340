// Runs a team over operations that count, check and spend time, in place of the real ones. `team_stress SCENARIO THREADS`
// prints "ok" or what went wrong. Built by tests/native/test_team.py, also with a sanitizer.
//
// Operands of an instruction here: i[0..3] chunks of each phase, i[4] microseconds that the first chunk of phase 0 sleeps on
// threads other than the caller's, p[0] its Tally.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernel.h"

using namespace samovar;
using Clock = std::chrono::steady_clock;

namespace {

// How often each chunk of each phase ran; every chunk has a place of its own.
struct Tally {
    std::vector<uint8_t> seen[MAX_PHASES];
};

std::atomic<const char*> problem{nullptr};
std::atomic<int> running{0}, sleeping{0};

void wrong(const char* what) { problem.store(what); }

Tally& tally(const Call& call) { return *static_cast<Tally*>(const_cast<void*>(call.instruction->p[0])); }

int chunks(const Call& call, int phase) { return call.instruction->i[phase]; }

size_t shared_bytes(const Call& call) { return size_t(call.instruction->i[0]) * sizeof(int); }

size_t thread_bytes(const Call&) { return 64; }

const char* refusal(const Call& call) { return call.instruction->i[5] ? "i[5] is set" : nullptr; }

// Written and read without care: a phase that begins too early, or a chunk that runs twice, is a race and a wrong value.
void run(const Call& call, int phase, int chunk, Worker& worker) {
    running.fetch_add(1);
    Tally& own = tally(call);
    int* shared = reinterpret_cast<int*>(call.shared);
    if (phase == 0) shared[chunk] = chunk + 1;
    else
        for (int n = 0; n < call.instruction->i[0]; n++)
            if (shared[n] != n + 1) wrong("a phase began before the one in front of it was over");
    if (own.seen[phase][chunk]++) wrong("a chunk ran twice");
    if (worker.is_first) std::memcpy(worker.scratch, &call.instruction, sizeof call.instruction);
    const SamovarInstruction* kept;
    std::memcpy(&kept, worker.scratch, sizeof kept);
    if (kept != call.instruction) wrong("scratch was not kept from the first chunk of a phase to the next ones");
    if (call.instruction->i[4] > 0 && phase == 0 && worker.thread != 0 && sleeping.exchange(1) == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(call.instruction->i[4]));
        sleeping.store(2);
    }
    running.fetch_sub(1);
}

struct List {
    std::vector<SamovarInstruction> instructions;
    std::vector<std::unique_ptr<Tally>> tallies;

    void add(std::vector<int> counts, int sleep = 0) {
        SamovarInstruction instruction = {};
        for (int& in : instruction.in) in = -1;
        for (int& out : instruction.out) out = -1;
        tallies.push_back(std::make_unique<Tally>());
        for (size_t n = 0; n < counts.size(); n++) {
            instruction.i[n] = counts[n];
            tallies.back()->seen[n].resize(counts[n]);
        }
        instruction.i[4] = sleep;
        instruction.p[0] = tallies.back().get();
        instructions.push_back(instruction);
    }

    void check() {
        for (size_t n = 0; n < tallies.size(); n++)
            for (int phase = 0; phase < MAX_PHASES; phase++)
                for (uint8_t& times : tallies[n]->seen[phase]) {
                    if (times != 1) wrong("a chunk did not run exactly once");
                    times = 0;
                }
    }
};

struct Runner {
    SamovarTeam* team;
    char error[256] = "";

    explicit Runner(int threads) : team(samovar_team_create(threads, nullptr, "generic", error, sizeof error)) {
        if (team == nullptr) wrong("no team");
    }
    ~Runner() { samovar_team_destroy(team); }

    double run(List& list) {
        SamovarStep step = {};
        step.counts[0] = 1;
        const Clock::time_point start = Clock::now();
        if (samovar_run(team, list.instructions.data(), int(list.instructions.size()), &step, error, sizeof error))
            wrong(error);
        if (running.load() != 0) wrong("a run returned while a chunk was running");
        return std::chrono::duration<double>(Clock::now() - start).count();
    }
};

void random_runs(int threads) {
    std::mt19937 random(threads);
    Runner runner(threads);
    for (int n = 0; n < 300 && !problem.load(); n++) {
        List list;  // freed after its run: the team must not look at it again
        for (int length = int(random() % 40); length >= 0; length--) {
            std::vector<int> counts(1 + random() % MAX_PHASES);
            for (int& count : counts) count = random() % 3 ? int(1 + random() % 9) : 1;
            list.add(counts);
        }
        for (int times = 0; times < 3; times++) {
            runner.run(list);
            list.check();
        }
        samovar_forget(runner.team);
        if (n % 100 == 99) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // long enough for all to fall asleep
    }
}

// A thread that is put aside inside a chunk delays its own run only; one that has no chunk delays nobody.
void put_aside(int threads) {
    Runner runner(threads);
    List slow, quick;
    slow.add({2, 1}, 30000);
    for (int n = 0; n < 50; n++) quick.add({4});
    for (int n = 0; n < 200 && sleeping.load() == 0 && threads > 1; n++) {
        const double took = runner.run(slow);
        slow.check();
        if (sleeping.load() && took < 0.025) wrong("a run was over before one of its chunks");
    }
    for (int n = 0; n < 20; n++) {
        runner.run(quick);
        quick.check();
    }
}

void created_and_destroyed(int threads) {
    for (int n = 0; n < 50; n++) {
        Runner runner(threads);
        List list;
        list.add({5, 2});
        for (int runs = n % 3; runs > 0; runs--) {
            runner.run(list);
            list.check();
        }
    }
}

// One team a thread, and callers that change from run to run.
void several_teams(int threads) {
    auto work = [threads] {
        Runner runner(threads);
        for (int n = 0; n < 30; n++) {
            List list;
            list.add({8, 3, 1, 8});
            std::thread caller([&] {
                SamovarStep step = {};
                step.counts[0] = 1;
                if (samovar_run(runner.team, list.instructions.data(), 1, &step, runner.error, sizeof runner.error))
                    wrong(runner.error);
            });
            caller.join();
            list.check();
        }
    };
    std::thread other(work);
    work();
    other.join();
}

void expect_refusal(Runner& runner, List& list, const SamovarStep& step, const char* part) {
    if (!samovar_run(runner.team, list.instructions.data(), int(list.instructions.size()), &step, runner.error,
                     sizeof runner.error))
        wrong("not refused");
    else if (std::strstr(runner.error, part) == nullptr) wrong(runner.error);
}

void refusals(int threads) {
    Runner runner(threads);
    SamovarStep step = {};
    step.counts[0] = 1;
    List list;
    list.add({1});
    list.add({1});
    SamovarInstruction& last = list.instructions[1];
    const SamovarInstruction good = last;
    last.op = 99;
    expect_refusal(runner, list, step, "instruction 1: there is no operation 99");
    last = good, last.op = SAMOVAR_ARGMAX;
    expect_refusal(runner, list, step, "instruction 1: ARGMAX is not built for generic");
    last = good, last.rows = SAMOVAR_NUM_COUNTS;
    expect_refusal(runner, list, step, "instruction 1 (EMBED): its rows");
    last = good, last.in[3] = 0;
    expect_refusal(runner, list, step, "instruction 1 (EMBED): an input is not a register");
    last = good, last.out[1] = -2;
    expect_refusal(runner, list, step, "instruction 1 (EMBED): an output is not a register");
    last = good, last.i[5] = 1;
    expect_refusal(runner, list, step, "instruction 1 (EMBED): i[5] is set");
    last = good, last.i[0] = 1 << 30;
    expect_refusal(runner, list, step, "1073741824 chunks of work");
    last = good;
    step.counts[0] = -1;
    expect_refusal(runner, list, step, "its count of rows is negative");
    for (auto& one : list.tallies)
        if (one->seen[0][0]) wrong("something ran although the list was refused");
    step.counts[0] = 0;  // no rows: nothing runs
    if (samovar_run(runner.team, list.instructions.data(), 2, &step, runner.error, sizeof runner.error)) wrong(runner.error);
    for (auto& one : list.tallies)
        if (one->seen[0][0]) wrong("something ran without rows");
    List none;
    runner.run(none);
    runner.run(list);
    list.check();
}

void reports(int threads) {
    Runner runner(threads);
    List list;
    list.add({4});
    for (int n = 0; n < 7; n++) {
        runner.run(list);
        list.check();
    }
    double waited, ran;
    int64_t runs;
    int32_t in_use;
    samovar_team_report(runner.team, &waited, &ran, &runs, &in_use);
    if (runs != 7 || ran <= 0 || waited < 0 || waited > ran || in_use < 1 || in_use > threads) wrong("a wrong report");
    samovar_team_report(runner.team, &waited, &ran, &runs, &in_use);
    if (runs != 0 || ran != 0 || waited != 0) wrong("a report was not begun anew");
    if (samovar_team_bytes(runner.team) < int64_t(64 * in_use + 4 * sizeof(int))) wrong("memory was not counted");
}

}  // namespace

namespace samovar {

const Table* table_generic() {
    static const Table table = [] {
        Table made = {"generic", {}, nullptr};
        made.operations[SAMOVAR_EMBED] = {chunks, run, shared_bytes, thread_bytes, refusal};
        return made;
    }();
    return &table;
}

}  // namespace samovar

int main(int count, char** words) {
    const std::string scenario = count > 1 ? words[1] : "";
    const int threads = count > 2 ? std::atoi(words[2]) : 1;
    if (scenario == "random_runs") random_runs(threads);
    else if (scenario == "put_aside") put_aside(threads);
    else if (scenario == "created_and_destroyed") created_and_destroyed(threads);
    else if (scenario == "several_teams") several_teams(threads);
    else if (scenario == "refusals") refusals(threads);
    else if (scenario == "reports") reports(threads);
    else wrong("there is no such scenario");
    std::puts(problem.load() ? problem.load() : "ok");
    return problem.load() ? 1 : 0;
}
