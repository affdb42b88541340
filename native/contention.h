// How long threads stood ready to run while something else had their processor, as Linux counts it.
#pragma once

#include <cstdint>
#include <vector>

namespace samovar {

class Contention {
public:
    explicit Contention(int num_threads) : threads_(num_threads) {}
    Contention(const Contention&) = delete;
    Contention& operator=(const Contention&) = delete;
    ~Contention();

    // Watch the thread of that number of the system as thread `n`.
    void watch(int n, int system_number);

    // Threads that stood waiting for more than `share` of `seconds` since the last call.
    int count_delayed(double seconds, double share);

private:
    struct Watched {
        int system_number = 0;
        int file = -1;  // of /proc; where there is none, the thread counts as never delayed
        int64_t delay = 0;
    };
    std::vector<Watched> threads_;
};

}  // namespace samovar
