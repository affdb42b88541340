// Asks the processor (CPUID) and the operating system (XGETBV, and for AMX a permission) what may be used.
// The bits are those of the Intel and AMD manuals; the AMX permission is Linux's arch_prctl(ARCH_REQ_XCOMP_PERM).
#include "isa.h"

#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace samovar {

namespace {

bool always() { return true; }

#if defined(__x86_64__)

enum Register { EAX, EBX, ECX, EDX };

bool has(unsigned leaf, unsigned subleaf, Register in, int bit) {
    unsigned values[4];
    if (!__get_cpuid_count(leaf, subleaf, &values[0], &values[1], &values[2], &values[3])) return false;
    return (values[in] >> bit & 1) != 0;
}

// The register sets that the operating system saves and restores.
bool system_saves(uint64_t parts) {
    if (!has(1, 0, ECX, 27)) return false;  // OSXSAVE
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t(high) << 32 | low) & parts) == parts;
}

bool has_avx2() {
    return system_saves(0x6) && has(1, 0, ECX, 12) && has(1, 0, ECX, 29) && has(7, 0, EBX, 5);  // FMA, F16C, AVX2
}

bool has_avx512() {
    return has_avx2() && system_saves(0xe6) && has(7, 0, EBX, 16) && has(7, 0, EBX, 17) && has(7, 0, EBX, 30) &&
           has(7, 0, EBX, 31);  // F, DQ, BW, VL
}

bool has_avx512_vnni() { return has_avx512() && has(7, 0, ECX, 11) && has(7, 1, EAX, 5); }  // VNNI, BF16

bool has_amx() {
    if (!has_avx512_vnni() || !system_saves(0x600e6)) return false;
    if (!has(7, 0, EDX, 22) || !has(7, 0, EDX, 24) || !has(7, 0, EDX, 25)) return false;  // BF16, TILE, INT8
#if defined(__linux__)
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_STATE = 18;  // asked for once, it holds for the whole process
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_STATE) == 0;
    return allowed;
#else
    return false;
#endif
}

#else

bool never() { return false; }
constexpr auto has_avx2 = never, has_avx512 = never, has_avx512_vnni = never, has_amx = never;

#endif

#if defined(SAMOVAR_WITH_avx2)
constexpr auto avx2 = table_avx2;
#else
constexpr const Table* (*avx2)() = nullptr;
#endif
#if defined(SAMOVAR_WITH_avx512)
constexpr auto avx512 = table_avx512;
#else
constexpr const Table* (*avx512)() = nullptr;
#endif
#if defined(SAMOVAR_WITH_avx512_vnni)
constexpr auto avx512_vnni = table_avx512_vnni;
#else
constexpr const Table* (*avx512_vnni)() = nullptr;
#endif
#if defined(SAMOVAR_WITH_amx)
constexpr auto amx = table_amx;
#else
constexpr const Table* (*amx)() = nullptr;
#endif

}  // namespace

const InstructionSet INSTRUCTION_SETS[NUM_SETS] = {
    {"generic", table_generic, always},  {"avx2", avx2, has_avx2}, {"avx512", avx512, has_avx512},
    {"avx512_vnni", avx512_vnni, has_avx512_vnni}, {"amx", amx, has_amx},
};

const InstructionSet* find_set(const char* name) {
    const InstructionSet* found = nullptr;
    for (const InstructionSet& set : INSTRUCTION_SETS)
        if (name ? std::strcmp(set.name, name) == 0 : set.table && set.is_usable()) found = &set;
    return found;
}

}  // namespace samovar

const char* samovar_best_isa(void) { return samovar::find_set(nullptr)->name; }

const char* samovar_compiled_isas(void) {
    static const std::string names = [] {
        std::string all;
        for (const samovar::InstructionSet& set : samovar::INSTRUCTION_SETS)
            if (set.table) all.append(all.empty() ? "" : " ").append(set.name);
        return all;
    }();
    return names.c_str();
}

int32_t samovar_abi_version(void) { return SAMOVAR_ABI_VERSION; }
