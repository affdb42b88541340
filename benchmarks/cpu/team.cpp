// Measures a team of threads over operations that only spend time: `team THREADS SECONDS` prints a figure a line.
// Built and run by team.py. i[0]: chunks of an instruction; i[1]: nanoseconds of work in each.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sched.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "kernel.h"

using namespace samovar;
using Clock = std::chrono::steady_clock;
using Instructions = std::vector<SamovarInstruction>;

namespace {

double loop_nanoseconds = 1;

void spend(double nanoseconds) {
    float x = 1;
    for (long n = long(nanoseconds / loop_nanoseconds); n > 0; n--) {
        x = x * 1.0001f + 0.1f;
        __asm__ volatile("" : "+r"(n) : "m"(x));
    }
}

int chunks(const Call& call, int phase) { return phase == 0 ? call.instruction->i[0] : 0; }

void run(const Call& call, int, int, Worker&) {
    if (call.instruction->i[1]) spend(call.instruction->i[1]);
}

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void calibrate() {
    double best = 1e9;
    for (int n = 0; n < 20; n++) {
        const double start = now();
        spend(1e6);
        best = std::min(best, now() - start);
    }
    loop_nanoseconds = best * 1e9 / 1e6;
}

Instructions list(int count, int chunks, int nanoseconds) {
    SamovarInstruction instruction = {};
    std::fill_n(instruction.in, 4, -1);
    std::fill_n(instruction.out, 2, -1);
    instruction.i[0] = chunks;
    instruction.i[1] = nanoseconds;
    return Instructions(count, instruction);
}

struct Bench {
    SamovarTeam* team;
    double seconds;

    double once(const Instructions& instructions) {
        SamovarStep step = {};
        step.counts[0] = 1;
        char error[256];
        const double start = now();
        if (samovar_run(team, instructions.data(), int(instructions.size()), &step, error, sizeof error)) {
            std::puts(error);
            std::exit(1);
        }
        return now() - start;
    }

    double typical(const Instructions& instructions, int times, int pause_microseconds = 0) {
        std::vector<double> took;
        for (int n = 0; n < times; n++) {
            if (pause_microseconds) std::this_thread::sleep_for(std::chrono::microseconds(pause_microseconds));
            took.push_back(once(instructions));
        }
        return median(took);
    }

    // Mean milliseconds of a step over some time, beside `neighbours` processes that never rest.
    double mean_step(const Instructions& step, int neighbours, int pinned_to = -1) {
        std::vector<pid_t> children;
        for (int n = 0; n < neighbours; n++) {
            const pid_t child = fork();
            if (child == 0) {
                cpu_set_t set;
                CPU_ZERO(&set);
                CPU_SET(std::max(pinned_to, 0), &set);
                if (pinned_to >= 0) sched_setaffinity(0, sizeof set, &set);
                for (;;) __asm__ volatile("");
            }
            children.push_back(child);
        }
        int count = 0;
        const double start = now();
        while (now() - start < seconds) {
            once(step);
            count++;
        }
        const double mean = (now() - start) / count * 1e3;
        for (pid_t child : children) {
            kill(child, SIGKILL);
            waitpid(child, nullptr, 0);
        }
        return mean;
    }
};

}  // namespace

namespace samovar {

const Table* table_generic() {
    static const Table table = [] {
        Table made = {"generic", {}, nullptr};
        made.operations[SAMOVAR_EMBED] = {chunks, run, nullptr, nullptr, nullptr};
        return made;
    }();
    return &table;
}

}  // namespace samovar

int main(int, char** words) {
    const int threads = std::atoi(words[1]);
    calibrate();
    char error[256];
    Bench bench = {samovar_team_create(threads, nullptr, "generic", error, sizeof error), std::atof(words[2])};
    if (bench.team == nullptr) return std::puts(error), 1;
    std::printf("phase of one chunk, ns: %.0f\n", bench.typical(list(1000, 1, 0), 50) * 1e6);
    std::printf("empty phase of two chunks, ns: %.0f\n", bench.typical(list(1000, 2, 0), 50) * 1e6);
    std::printf("empty phase of eight chunks, ns: %.0f\n", bench.typical(list(1000, 8, 0), 50) * 1e6);
    std::printf("run of one instruction, us: %.2f\n", bench.typical(list(1, 2, 0), 1000) * 1e6);
    const double spinning = bench.typical(list(1, threads, 50000), 300), slept = bench.typical(list(1, threads, 50000), 300, 2000);
    std::printf("run of 50 us of work on every thread, us: %.1f; after 2 ms of rest: %.1f\n", spinning * 1e6, slept * 1e6);
    // What a small model's decode looks like: 200 phases, 3 ms.
    const Instructions step = list(200, 4 * threads, 3750);
    const double quiet = bench.mean_step(step, 0);
    std::printf("step of 200 phases, ms: %.2f\n", quiet);
    const auto report = [&](const char* name, double took) { std::printf("%s, ms: %.2f, %.2fx\n", name, took, took / quiet); };
    report("beside one busy process", bench.mean_step(step, 1));
    report("beside one busy process on processor 0", bench.mean_step(step, 1, 0));
    report("beside two busy processes", bench.mean_step(step, 2));
    report("quiet again", bench.mean_step(step, 0));
    samovar_team_destroy(bench.team);
    return 0;
}
