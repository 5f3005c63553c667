// Members as the bootstrap tests need them.
#pragma once

#include <string>

#include "hybridps/bootstrap/record.h"

namespace hybridps::bootstrap::testing {

inline MemberRecord sample_member(int rank, int size, std::uint64_t engine, const std::string& identity = "node:a") {
  MemberRecord member;
  member.build = "0.1.0";
  member.incarnation = "run.0.0";
  member.engine.value = engine;
  member.node_identity = identity;
  member.host_name = "host-" + identity.substr(identity.find(':') + 1);
  member.pid = 1000 + static_cast<std::uint32_t>(rank);
  member.group_rank = rank;
  member.group_size = size;
  member.shm_address = {1, 2, static_cast<std::uint8_t>(rank)};
  member.data_address = {3, 4};
  member.control_address = {};
  member.eager_bytes = 512 << 10;
  member.chunk_bytes = 64 << 10;
  member.node_gbps = 25;
  member.nics = {{"eth1", "10.1.0.0/24", 12.5}, {"eth2", "", 0}};
  member.control = {"eth0", "10.0.0.0/24", 1};
  member.machine = 77;
  return member;
}

/// Two ranks per node.
inline Roster sample_roster(int size) {
  Roster roster;
  roster.nonce = 7;
  roster.uid = {1, 2};
  for (int rank = 0; rank < size; ++rank) {
    roster.members.push_back(
        sample_member(rank, size, 100 + static_cast<std::uint64_t>(rank), "node:" + std::to_string(rank / 2)));
    roster.node_of.push_back(rank / 2);
  }
  return roster;
}

}  // namespace hybridps::bootstrap::testing
