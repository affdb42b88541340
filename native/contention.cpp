// Reads /proc/.../schedstat: nanoseconds on a processor, nanoseconds ready but waiting for one, time slices.
#include "contention.h"

#include <cstdio>
#include <fcntl.h>
#include <unistd.h>

namespace samovar {

namespace {

int64_t read_delay(int file) {
    char text[96];
    const ssize_t length = file < 0 ? -1 : pread(file, text, sizeof text - 1, 0);
    if (length <= 0) return 0;
    text[length] = 0;
    long long ran = 0, delay = 0;
    return std::sscanf(text, "%lld %lld", &ran, &delay) == 2 ? delay : 0;
}

}  // namespace

Contention::~Contention() {
    for (const Watched& thread : threads_)
        if (thread.file >= 0) close(thread.file);
}

void Contention::watch(int n, int system_number) {
    Watched& thread = threads_[n];
    if (thread.system_number == system_number) return;
    if (thread.file >= 0) close(thread.file);
    char path[64];
    std::snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", system_number);
    thread.system_number = system_number;
    thread.file = open(path, O_RDONLY | O_CLOEXEC);
    thread.delay = read_delay(thread.file);
}

int Contention::count_delayed(double seconds, double share) {
    int count = 0;
    for (Watched& thread : threads_) {
        const int64_t delay = read_delay(thread.file);
        if (double(delay - thread.delay) * 1e-9 > share * seconds) count++;
        thread.delay = delay;
    }
    return count;
}

}  // namespace samovar
