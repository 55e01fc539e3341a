// Compiled in tests against NCCL's real header, or what the vendors' bindings declare of NCCL and RCCL; never part of a
// module.
#include <nccl.h>

#include <cstddef>

#include "ccl.h"
#include "same_abi.h"

namespace {

using monarch::ccl::Config;
using monarch::ccl::Table;
using monarch::check::SameAbi;

#define SAME(entry, function) static_assert(SameAbi<decltype(Table::entry), decltype(&function)>::value, #entry)

SAME(get_version, ncclGetVersion);
SAME(get_unique_id, ncclGetUniqueId);
SAME(init_rank, ncclCommInitRankConfig);
SAME(destroy, ncclCommDestroy);
SAME(abort, ncclCommAbort);
SAME(async_error, ncclCommGetAsyncError);
SAME(split, ncclCommSplit);
SAME(error_string, ncclGetErrorString);
SAME(last_error, ncclGetLastError);
SAME(all_reduce, ncclAllReduce);
SAME(all_gather, ncclAllGather);
SAME(reduce_scatter, ncclReduceScatter);
SAME(broadcast, ncclBroadcast);
SAME(reduce, ncclReduce);
SAME(send, ncclSend);
SAME(recv, ncclRecv);
SAME(group_start, ncclGroupStart);
SAME(group_end, ncclGroupEnd);
SAME(pre_mul_sum, ncclRedOpCreatePreMulSum);
SAME(drop_op, ncclRedOpDestroy);

static_assert(sizeof(monarch::ccl::UniqueId) == sizeof(ncclUniqueId));
static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(Config, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(Config, net_name) == offsetof(ncclConfig_t, netName));
#ifndef MONARCH_NO_CONSTANTS
static_assert(ncclSum == 0 && ncclProd == 1 && ncclMax == 2 && ncclMin == 3 && ncclAvg == 4);
static_assert(ncclScalarDevice == 0 && ncclScalarHostImmediate == 1);
static_assert(ncclInt8 == 0 && ncclUint8 == 1 && ncclInt32 == 2 && ncclUint32 == 3 && ncclInt64 == 4);
static_assert(ncclUint64 == 5 && ncclFloat16 == 6 && ncclFloat32 == 7 && ncclFloat64 == 8 && ncclBfloat16 == 9);
static_assert(ncclFloat8e4m3 == 10 && ncclFloat8e5m2 == 11);
#endif

}  // namespace
