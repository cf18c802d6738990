// libacl_op_compiler.so: the options that the wheel sets at its start.
#include <cstddef>
#include <cstdint>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

API int aclSetCompileopt(int, const char*) { return 0; }
API size_t aclGetCompileoptSize(int) { return 16; }
API int aclGetCompileopt(int, char* value, size_t size) { return std::strncpy(value, "disable", size), 0; }
API int aclopSetCompileFlag(int) { return 0; }
API int aclGenGraphAndDumpForOp() { return 207000; }
API int aclrtGetSysParamOpt(int, int64_t* value) { return *value = 0, 0; }
API int aclrtSetSysParamOpt(int, int64_t) { return 0; }
API int aclrtCtxSetSysParamOpt(int, int64_t) { return 0; }
