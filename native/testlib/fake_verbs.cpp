// libibverbs' symbols for one device of host memory: a queue pair copies at once to or from registered memory of this
// process. It checks keys, bounds, rights and depths as a device does. What goes wrong is told by `fake_verbs_set`.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#undef ibv_query_port
#undef ibv_reg_mr

namespace {

std::mutex mutex;
int mode = 0;  // 0: completes at once, 1: never, 2: one piece at each look, which takes a millisecond
bool port_up = true;
long held = 0;  // objects that were not given back
std::uint32_t next_number = 100;

struct Queue : ibv_cq {
  std::deque<ibv_wc> done;
  std::deque<ibv_wc> waiting;  // in mode 2
  bool armed = false;
};

struct Pair : ibv_qp {
  std::uint32_t peer = 0, depth = 0, open = 0;
  bool broken = false;
};

std::map<std::uint32_t, ibv_mr*> regions;
std::map<std::uint32_t, int> rights;
std::map<std::uint32_t, Pair*> pairs;
ibv_device device{};
ibv_device* devices[] = {&device, nullptr};

bool covers(std::uint32_t key, std::uint64_t address, std::uint64_t length, int right) {
  const auto found = regions.find(key);
  if (found == regions.end() || (right & ~rights[key]) != 0) return false;
  const auto start = reinterpret_cast<std::uint64_t>(found->second->addr);
  return start <= address && address + length <= start + found->second->length;
}

ibv_wc_status carry_out(Pair& pair, const ibv_send_wr& wr) {
  const auto peer = pairs.find(pair.peer);
  const ibv_sge& here = wr.sg_list[0];
  const bool write = wr.opcode == IBV_WR_RDMA_WRITE;
  if (!covers(here.lkey, here.addr, here.length, write ? 0 : IBV_ACCESS_LOCAL_WRITE)) return IBV_WC_LOC_PROT_ERR;
  if (peer == pairs.end()) return IBV_WC_RETRY_EXC_ERR;
  const std::uint64_t there = wr.wr.rdma.remote_addr;
  const int right = write ? IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ;
  if (!covers(wr.wr.rdma.rkey, there, here.length, right)) return IBV_WC_REM_ACCESS_ERR;
  auto* const local = reinterpret_cast<char*>(here.addr);
  auto* const remote = reinterpret_cast<char*>(there);
  std::memcpy(write ? remote : local, write ? local : remote, here.length);
  return IBV_WC_SUCCESS;
}

void complete(Queue& queue, const ibv_wc& wc) {
  queue.done.push_back(wc);
  if (static_cast<int>(queue.done.size() + queue.waiting.size()) > queue.cqe) std::abort();
  if (queue.armed) {
    queue.armed = false;
    eventfd_write(queue.channel->fd, 1);
  }
}

int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto& pair = *static_cast<Pair*>(qp);
  if (pair.open >= pair.depth || pair.state != IBV_QPS_RTS) {
    *bad = wr;
    return ENOMEM;
  }
  ++pair.open;
  if (mode == 1) return 0;
  ibv_wc wc{};
  wc.wr_id = wr->wr_id;
  wc.qp_num = pair.qp_num;
  wc.status = pair.broken ? IBV_WC_WR_FLUSH_ERR : carry_out(pair, *wr);
  pair.broken = pair.broken || wc.status != IBV_WC_SUCCESS;
  auto& queue = *static_cast<Queue*>(pair.send_cq);
  if (mode == 2) {
    queue.waiting.push_back(wc);
  } else {
    complete(queue, wc);
  }
  return 0;
}

int poll_cq(ibv_cq* cq, int room, ibv_wc* wcs) {
  auto& queue = *static_cast<Queue*>(cq);
  if (mode == 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const std::lock_guard<std::mutex> lock(mutex);
  if (!queue.waiting.empty()) {
    complete(queue, queue.waiting.front());
    queue.waiting.pop_front();
  }
  int count = 0;
  for (; count < room && !queue.done.empty(); ++count) {
    wcs[count] = queue.done.front();
    queue.done.pop_front();
    const auto pair = pairs.find(wcs[count].qp_num);
    if (pair != pairs.end()) --pair->second->open;
  }
  return count;
}

int req_notify_cq(ibv_cq* cq, int) {
  const std::lock_guard<std::mutex> lock(mutex);
  static_cast<Queue*>(cq)->armed = true;
  return 0;
}

ibv_mr* add_region(ibv_pd* pd, void* address, std::size_t length, int access) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto* region = new ibv_mr{};
  region->pd = pd;
  region->addr = address;
  region->length = length;
  region->lkey = region->rkey = next_number++;
  regions[region->rkey] = region;
  rights[region->rkey] = access;
  ++held;
  return region;
}

}  // namespace

extern "C" {

void fake_verbs_set(int new_mode, bool up) {
  mode = new_mode;
  port_up = up;
}
long fake_verbs_held() { return held; }

ibv_device** ibv_get_device_list(int* count) {
  *count = 1;
  return devices;
}
void ibv_free_device_list(ibv_device**) {}
const char* ibv_get_device_name(ibv_device*) { return "fake0"; }
ibv_context* ibv_open_device(ibv_device* of) {
  auto* context = new ibv_context{};
  context->device = of;
  context->ops.post_send = post_send;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  ++held;
  return context;
}
int ibv_close_device(ibv_context* context) {
  delete context;
  --held;
  return 0;
}
int ibv_query_device(ibv_context*, ibv_device_attr* attributes) {
  attributes->max_qp_rd_atom = attributes->max_qp_init_rd_atom = 4;
  return 0;
}
int ibv_query_port(ibv_context*, std::uint8_t, _compat_ibv_port_attr* compat) {
  auto* attributes = reinterpret_cast<ibv_port_attr*>(compat);
  attributes->state = port_up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  attributes->active_mtu = IBV_MTU_4096;
  attributes->lid = 7;
  return 0;
}
int ibv_query_gid(ibv_context*, std::uint8_t, int index, ibv_gid* gid) {
  gid->raw[15] = static_cast<std::uint8_t>(index);
  return 0;
}
ibv_pd* ibv_alloc_pd(ibv_context* context) {
  ++held;
  return new ibv_pd{context, 0};
}
int ibv_dealloc_pd(ibv_pd* pd) {
  delete pd;
  --held;
  return 0;
}
ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, std::size_t length, int access) {
  return add_region(pd, address, length, access);
}
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova, int fd,
                          int access) {
  struct stat there{};
  if (fstat(fd, &there) != 0) return nullptr;
  if (offset + length > static_cast<std::uint64_t>(there.st_size)) {
    errno = EINVAL;
    return nullptr;
  }
  return add_region(pd, reinterpret_cast<void*>(iova), length, access);
}
int ibv_dereg_mr(ibv_mr* region) {
  const std::lock_guard<std::mutex> lock(mutex);
  regions.erase(region->rkey);
  rights.erase(region->rkey);
  delete region;
  --held;
  return 0;
}
ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  ++held;
  return new ibv_comp_channel{context, eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE), 0};
}
int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  close(channel->fd);
  delete channel;
  --held;
  return 0;
}
ibv_cq* ibv_create_cq(ibv_context* context, int cqe, void*, ibv_comp_channel* channel, int) {
  auto* queue = new Queue();
  queue->context = context;
  queue->channel = channel;
  queue->cqe = cqe;
  ++held;
  return queue;
}
int ibv_destroy_cq(ibv_cq* cq) {
  delete static_cast<Queue*>(cq);
  --held;
  return 0;
}
int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq**, void**) {
  eventfd_t value = 0;
  return eventfd_read(channel->fd, &value);
}
void ibv_ack_cq_events(ibv_cq*, unsigned) {}
ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto* pair = new Pair();
  pair->context = pd->context;
  pair->send_cq = init->send_cq;
  pair->depth = init->cap.max_send_wr;
  pair->qp_num = next_number++;
  pairs[pair->qp_num] = pair;
  ++held;
  return pair;
}
int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  const std::lock_guard<std::mutex> lock(mutex);
  if ((mask & IBV_QP_DEST_QPN) != 0) static_cast<Pair*>(qp)->peer = attr->dest_qp_num;
  qp->state = attr->qp_state;
  return 0;
}
int ibv_destroy_qp(ibv_qp* qp) {
  const std::lock_guard<std::mutex> lock(mutex);
  pairs.erase(qp->qp_num);
  delete static_cast<Pair*>(qp);
  --held;
  return 0;
}
const char* ibv_wc_status_str(ibv_wc_status) { return "as the fake says"; }
int ibv_fork_init() { return 0; }
}
