// What the environment says of the simulated machine. Read once per process.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace ascend_sim {

inline long setting(const char* name, long otherwise) {
    const char* value = std::getenv(name);
    return value && *value ? std::strtol(value, nullptr, 10) : otherwise;
}

struct Settings {
    int devices = static_cast<int>(setting("ASCEND_SIM_DEVICES", 1));
    size_t memory_bytes = static_cast<size_t>(setting("ASCEND_SIM_MEMORY_MB", 4096)) << 20;
    long copy_us = setting("ASCEND_SIM_COPY_US", 0);
    long op_us = setting("ASCEND_SIM_OP_US", 0);

    static const Settings& get() {
        static const Settings settings;
        return settings;
    }
};

}  // namespace ascend_sim
