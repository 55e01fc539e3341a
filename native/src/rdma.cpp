#include "rdma.h"

#ifdef MONARCH_HAS_VERBS
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "dl.h"

// Macros of verbs.h that would replace the names of our table.
#undef ibv_query_port
#undef ibv_reg_mr

namespace monarch::rdma {
namespace {

// The functions that libibverbs exports; posting and polling go through the device's own table and need no symbol.
struct Api {
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  int (*query_port)(ibv_context*, std::uint8_t, ibv_port_attr*);
  decltype(&::ibv_query_gid) query_gid;
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  ibv_mr* (*reg_mr)(ibv_pd*, void*, std::size_t, int);
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr;  // null before rdma-core 34
  decltype(&::ibv_create_comp_channel) create_comp_channel;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_get_cq_event) get_cq_event;
  decltype(&::ibv_ack_cq_events) ack_cq_events;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_wc_status_str) wc_status_str;
  decltype(&::ibv_fork_init) fork_init;
};

Api load() {
  const Library library("libibverbs", {"libibverbs.so.1"},
                        "install it (Debian: libibverbs1 and ibverbs-providers; RHEL: libibverbs)");
  Api api{};
  library.require(api.get_device_list, "ibv_get_device_list");
  library.require(api.free_device_list, "ibv_free_device_list");
  library.require(api.get_device_name, "ibv_get_device_name");
  library.require(api.open_device, "ibv_open_device");
  library.require(api.close_device, "ibv_close_device");
  library.require(api.query_device, "ibv_query_device");
  library.require(api.query_port, "ibv_query_port");
  library.require(api.query_gid, "ibv_query_gid");
  library.require(api.alloc_pd, "ibv_alloc_pd");
  library.require(api.dealloc_pd, "ibv_dealloc_pd");
  library.require(api.reg_mr, "ibv_reg_mr");
  library.require(api.dereg_mr, "ibv_dereg_mr");
  library.find(api.reg_dmabuf_mr, "ibv_reg_dmabuf_mr");
  library.require(api.create_comp_channel, "ibv_create_comp_channel");
  library.require(api.destroy_comp_channel, "ibv_destroy_comp_channel");
  library.require(api.create_cq, "ibv_create_cq");
  library.require(api.destroy_cq, "ibv_destroy_cq");
  library.require(api.get_cq_event, "ibv_get_cq_event");
  library.require(api.ack_cq_events, "ibv_ack_cq_events");
  library.require(api.create_qp, "ibv_create_qp");
  library.require(api.modify_qp, "ibv_modify_qp");
  library.require(api.destroy_qp, "ibv_destroy_qp");
  library.require(api.wc_status_str, "ibv_wc_status_str");
  library.require(api.fork_init, "ibv_fork_init");
  // Registered pages must not be copied away from under the device by a fork; a no-op on kernels that see to it.
  api.fork_init();
  return api;
}

const Api& api() {
  static const Api loaded = load();
  return loaded;
}

// 4.096 us * 2^16 = 268 ms per try; with 6 retries a dead host is told in about two seconds (a dead process sooner, by
// the control plane). 7 would mean for ever on rxe. A shorter time takes a slow software device for dead.
constexpr int kTimeout = 16;
constexpr int kRetries = 6;
constexpr int kRnrRetries = 6;
// Bytes under way on a link: many times what a fast network holds, little enough that a slow one answers in time.
constexpr std::uint64_t kWindow = 8 << 20;
constexpr int kSpins = 200;
constexpr int kNapMs = 50;

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

template <typename Handle>
Handle checked(const char* call, typename Handle::pointer made) {
  if (made == nullptr) throw VerbsError(call, errno);
  return Handle(made);
}

int access_flags(bool local_write, bool remote) {
  int access = local_write ? IBV_ACCESS_LOCAL_WRITE : 0;
  if (remote) access |= IBV_ACCESS_REMOTE_READ | (local_write ? IBV_ACCESS_REMOTE_WRITE : 0);
  return access;
}

Context open(const std::string& name) {
  int count = 0;
  ibv_device** devices = api().get_device_list(&count);
  if (devices == nullptr) throw VerbsError("ibv_get_device_list", errno);
  ibv_context* opened = nullptr;
  int code = ENODEV;
  for (int i = 0; i < count; ++i) {
    if (name == api().get_device_name(devices[i])) {
      opened = api().open_device(devices[i]);
      code = errno;
    }
  }
  api().free_device_list(devices);
  if (opened == nullptr) throw VerbsError("ibv_open_device " + name, code);
  return Context(opened);
}

}  // namespace

VerbsError::VerbsError(const std::string& call, int code)
    : std::runtime_error(call + " failed: " + std::strerror(code)), code_(code) {}

void ContextCloser::operator()(ibv_context* p) const noexcept { api().close_device(p); }
void PdCloser::operator()(ibv_pd* p) const noexcept { api().dealloc_pd(p); }
void MrCloser::operator()(ibv_mr* p) const noexcept { api().dereg_mr(p); }
void ChannelCloser::operator()(ibv_comp_channel* p) const noexcept { api().destroy_comp_channel(p); }
void CqCloser::operator()(ibv_cq* p) const noexcept { api().destroy_cq(p); }
void QpCloser::operator()(ibv_qp* p) const noexcept { api().destroy_qp(p); }

Device::Device(const std::string& name, int port_number, int gid)
    : context(open(name)),
      pd(checked<Pd>("ibv_alloc_pd", api().alloc_pd(context.get()))),
      port(port_number),
      gid_index(gid) {
  ibv_device_attr attributes{};
  if (int code = api().query_device(context.get(), &attributes)) throw VerbsError("ibv_query_device", code);
  max_reads = std::clamp(std::min(attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom), 1, 16);
  if (int code = api().query_port(context.get(), port, &port_)) throw VerbsError("ibv_query_port", code);
  if (int code = api().query_gid(context.get(), port, gid_index, &gid_)) throw VerbsError("ibv_query_gid", code);
}

bool Device::port_is_active() const {
  ibv_port_attr attributes{};
  return api().query_port(context.get(), port, &attributes) == 0 && attributes.state == IBV_PORT_ACTIVE;
}

Region::Region(std::shared_ptr<Device> device, std::uint64_t address, std::uint64_t nbytes, bool local_write,
               bool remote)
    : device_(std::move(device)) {
  const int access = access_flags(local_write, remote);
  mr_ = checked<Mr>("ibv_reg_mr", api().reg_mr(device_->pd.get(), reinterpret_cast<void*>(address), nbytes, access));
}

Region::Region(std::shared_ptr<Device> device, int fd, std::uint64_t offset, std::uint64_t address,
               std::uint64_t nbytes, bool local_write, bool remote)
    : device_(std::move(device)) {
  if (api().reg_dmabuf_mr == nullptr) throw VerbsError("ibv_reg_dmabuf_mr", ENOSYS);
  const int access = access_flags(local_write, remote);
  mr_ = checked<Mr>("ibv_reg_dmabuf_mr", api().reg_dmabuf_mr(device_->pd.get(), offset, nbytes, address, fd, access));
}

Link::Link(std::shared_ptr<Device> device, int queue_pairs, int depth)
    : device_(std::move(device)),
      channel_(checked<Channel>("ibv_create_comp_channel", api().create_comp_channel(device_->context.get()))),
      cq_(checked<Cq>("ibv_create_cq",
                      api().create_cq(device_->context.get(), queue_pairs * depth + 1, nullptr, channel_.get(), 0))),
      depth_(depth) {
  for (int i = 0; i < queue_pairs; ++i) {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_.get();
    init.qp_type = IBV_QPT_RC;
    init.cap.max_send_wr = static_cast<std::uint32_t>(depth);
    init.cap.max_recv_wr = 1;
    init.cap.max_send_sge = init.cap.max_recv_sge = 1;
    Qp qp = checked<Qp>("ibv_create_qp", api().create_qp(device_->pd.get(), &init));
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = static_cast<std::uint8_t>(device_->port);
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    const int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    if (int code = api().modify_qp(qp.get(), &attr, mask)) throw VerbsError("ibv_modify_qp to INIT", code);
    qps_.push_back(std::move(qp));
  }
}

std::vector<std::uint32_t> Link::numbers() const {
  std::vector<std::uint32_t> numbers;
  numbers.reserve(qps_.size());
  for (const Qp& qp : qps_) numbers.push_back(qp->qp_num);
  return numbers;
}

void Link::connect(const std::vector<std::uint32_t>& numbers, const std::string& gid, int lid, int mtu) {
  if (numbers.size() != qps_.size() || gid.size() != sizeof(ibv_gid)) {
    throw std::invalid_argument("the peer's answer does not fit: other number of queue pairs, or no GID");
  }
  for (std::size_t i = 0; i < qps_.size(); ++i) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = static_cast<ibv_mtu>(std::min(mtu, device_->mtu()));
    attr.dest_qp_num = numbers[i];
    // The number of a queue pair is as good a start as any, and both ends know it.
    attr.rq_psn = numbers[i] & 0xffffff;
    attr.max_dest_rd_atomic = static_cast<std::uint8_t>(device_->max_reads);
    attr.min_rnr_timer = 12;
    attr.ah_attr.port_num = static_cast<std::uint8_t>(device_->port);
    attr.ah_attr.dlid = static_cast<std::uint16_t>(lid);
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.hop_limit = 64;
    attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device_->gid_index);
    std::memcpy(attr.ah_attr.grh.dgid.raw, gid.data(), gid.size());
    int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    if (int code = api().modify_qp(qps_[i].get(), &attr, mask)) throw VerbsError("ibv_modify_qp to RTR", code);
    attr = {};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = kTimeout;
    attr.retry_cnt = kRetries;
    attr.rnr_retry = kRnrRetries;
    attr.sq_psn = qps_[i]->qp_num & 0xffffff;
    attr.max_rd_atomic = static_cast<std::uint8_t>(device_->max_reads);
    mask =
        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
    if (int code = api().modify_qp(qps_[i].get(), &attr, mask)) throw VerbsError("ibv_modify_qp to RTS", code);
  }
}

Outcome Link::transfer(const std::vector<Copy>& copies, std::uint64_t chunk_bytes, double seconds) {
  if (qps_.empty()) return {"device", "this link has failed before"};
  Outcome outcome = run(copies, chunk_bytes, seconds);
  if (!outcome.kind.empty()) qps_.clear();
  return outcome;
}

Outcome Link::run(const std::vector<Copy>& copies, std::uint64_t chunk_bytes, double seconds) {
  const std::int64_t deadline = now_ns() + static_cast<std::int64_t>(seconds * 1e9);
  std::vector<int> under_way(qps_.size(), 0);
  std::size_t copy = 0;
  std::uint64_t offset = 0;
  int total = 0;
  std::uint64_t bytes_under_way = 0;
  std::size_t next = 0;
  ibv_wc wcs[32];
  while (true) {
    while (copy < copies.size()) {
      std::size_t tries = 0;
      while (tries < qps_.size() && under_way[next] >= depth_) {
        next = (next + 1) % qps_.size();
        ++tries;
      }
      if (tries == qps_.size()) break;
      const Copy& what = copies[copy];
      const std::uint64_t size = std::min(chunk_bytes, what.nbytes - offset);
      if (total > 0 && bytes_under_way + size > kWindow) break;
      ibv_sge piece{what.local + offset, static_cast<std::uint32_t>(size), what.lkey};
      ibv_send_wr wr{};
      wr.wr_id = size << 16 | next;
      wr.sg_list = &piece;
      wr.num_sge = 1;
      wr.opcode = what.write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.wr.rdma.remote_addr = what.remote + offset;
      wr.wr.rdma.rkey = what.rkey;
      ibv_send_wr* bad = nullptr;
      if (int code = ibv_post_send(qps_[next].get(), &wr, &bad)) {
        return {"device", std::string("ibv_post_send failed: ") + std::strerror(code)};
      }
      ++under_way[next];
      ++total;
      bytes_under_way += size;
      next = (next + 1) % qps_.size();
      offset += size;
      if (offset == what.nbytes) {
        ++copy;
        offset = 0;
      }
    }
    if (total == 0) return {};
    // Also while completions keep coming.
    if (now_ns() > deadline) return {"timeout", "the transfer was not complete within its timeout"};
    if (cancelled_) return {"cancelled", "the transfer was cancelled"};
    const int count = wait(wcs, 32, deadline);
    if (count < 0) return {"device", "polling the completion queue failed"};
    if (count == 0) continue;  // the deadline, or cancelled
    for (int i = 0; i < count; ++i) {
      if (wcs[i].status != IBV_WC_SUCCESS) return failed(wcs[i]);
      --under_way[wcs[i].wr_id & 0xffff];
      bytes_under_way -= wcs[i].wr_id >> 16;
      --total;
    }
  }
}

// Returns the number of completions, 0 at the deadline or when cancelled, -1 on an error.
int Link::wait(ibv_wc* wcs, int room, std::int64_t deadline_ns) {
  for (int spin = 0; spin < kSpins; ++spin) {
    const int count = ibv_poll_cq(cq_.get(), room, wcs);
    if (count != 0) return count;
  }
  while (!cancelled_) {
    if (ibv_req_notify_cq(cq_.get(), 0) != 0) return -1;
    // What completed before the request gives no event, so look once more before sleeping.
    const int count = ibv_poll_cq(cq_.get(), room, wcs);
    if (count != 0) return count;
    const std::int64_t left_ms = (deadline_ns - now_ns()) / 1'000'000;
    if (left_ms < 0) return 0;
    pollfd waiting{channel_->fd, POLLIN, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(std::min<std::int64_t>(left_ms + 1, kNapMs)));
    if (ready > 0) {
      ibv_cq* cq = nullptr;
      void* unused = nullptr;
      if (api().get_cq_event(channel_.get(), &cq, &unused) != 0) return -1;
      api().ack_cq_events(cq, 1);
    }
  }
  return 0;
}

Outcome Link::failed(const ibv_wc& wc) const {
  const std::string text = api().wc_status_str(wc.status);
  if (!device_->port_is_active()) return {"device", "the port of the RDMA device is down (" + text + ")"};
  switch (wc.status) {
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
    case IBV_WC_REM_ABORT_ERR:
      return {"peer", text};
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR:
      return {"access", text};
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return {"local", text};
    default:
      return {"device", text};
  }
}

}  // namespace monarch::rdma
#endif
