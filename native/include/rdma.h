// ibverbs as this package uses it: one device, memory regions, and links of reliable queue pairs to one peer.
// Every resource is a type whose destructor gives it back; each keeps alive what it was made of, so teardown is in
// mirror order.
#pragma once

#if __has_include(<infiniband/verbs.h>)
#define MONARCH_HAS_VERBS 1
#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace monarch::rdma {

// A call of libibverbs failed; the text has the call and the system's reason.
class VerbsError : public std::runtime_error {
 public:
  VerbsError(const std::string& call, int code);
  int code() const noexcept { return code_; }

 private:
  int code_;
};

struct ContextCloser {
  void operator()(ibv_context* p) const noexcept;
};
struct PdCloser {
  void operator()(ibv_pd* p) const noexcept;
};
struct MrCloser {
  void operator()(ibv_mr* p) const noexcept;
};
struct ChannelCloser {
  void operator()(ibv_comp_channel* p) const noexcept;
};
struct CqCloser {
  void operator()(ibv_cq* p) const noexcept;
};
struct QpCloser {
  void operator()(ibv_qp* p) const noexcept;
};
using Context = std::unique_ptr<ibv_context, ContextCloser>;
using Pd = std::unique_ptr<ibv_pd, PdCloser>;
using Mr = std::unique_ptr<ibv_mr, MrCloser>;
using Channel = std::unique_ptr<ibv_comp_channel, ChannelCloser>;
using Cq = std::unique_ptr<ibv_cq, CqCloser>;
using Qp = std::unique_ptr<ibv_qp, QpCloser>;

// An open device with the port and GID that its queue pairs use.
class Device {
 public:
  Device(const std::string& name, int port, int gid_index);
  bool port_is_active() const;
  std::string gid() const { return {reinterpret_cast<const char*>(gid_.raw), sizeof gid_.raw}; }
  int lid() const { return port_.lid; }
  int mtu() const { return port_.active_mtu; }

  Context context;
  Pd pd;
  const int port;
  const int gid_index;
  int max_reads;

 private:
  ibv_port_attr port_{};
  ibv_gid gid_{};
};

// Registered memory.
class Region {
 public:
  Region(std::shared_ptr<Device> device, std::uint64_t address, std::uint64_t nbytes, bool local_write, bool remote);
  // Memory of a GPU by its dmabuf, whose bytes from `offset` on have `address` there. The descriptor stays the
  // caller's.
  Region(std::shared_ptr<Device> device, int fd, std::uint64_t offset, std::uint64_t address, std::uint64_t nbytes,
         bool local_write, bool remote);
  std::uint32_t lkey() const { return mr_->lkey; }
  std::uint32_t rkey() const { return mr_->rkey; }

 private:
  std::shared_ptr<Device> device_;
  Mr mr_;
};

// One copy between registered local memory and registered memory of the peer.
struct Copy {
  bool write;
  std::uint64_t local;
  std::uint32_t lkey;
  std::uint64_t remote;
  std::uint32_t rkey;
  std::uint64_t nbytes;
};

// What became of a transfer: `kind` is empty when all is well, else "peer", "access", "local", "device", "timeout" or
// "cancelled".
struct Outcome {
  std::string kind;
  std::string text;
};

// Queue pairs to one peer, all on one completion queue.
class Link {
 public:
  Link(std::shared_ptr<Device> device, int queue_pairs, int depth);
  std::vector<std::uint32_t> numbers() const;
  // Brings every queue pair to "ready to send" towards the peer's queue pairs `numbers`.
  void connect(const std::vector<std::uint32_t>& numbers, const std::string& gid, int lid, int mtu);
  // Does all copies, cut into chunks that are spread over the queue pairs. After any failure the queue pairs are
  // destroyed, so that nothing touches the caller's memory any more, and the link is of no further use.
  Outcome transfer(const std::vector<Copy>& copies, std::uint64_t chunk_bytes, double seconds);
  // Makes `transfer` end soon. For any thread.
  void cancel() { cancelled_ = true; }

 private:
  Outcome run(const std::vector<Copy>& copies, std::uint64_t chunk_bytes, double seconds);
  Outcome failed(const ibv_wc& wc) const;
  int wait(ibv_wc* wcs, int room, std::int64_t deadline_ns);

  std::shared_ptr<Device> device_;
  Channel channel_;
  Cq cq_;
  std::vector<Qp> qps_;
  int depth_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace monarch::rdma
#endif
