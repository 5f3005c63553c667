#include "hybridps/compress/residuals.h"

#include "tests/support/catch.h"

using namespace hybridps;
using compress::MemoryBudget;
using compress::Residuals;

TEST_CASE("compress/residuals: a tensor's values begin as zeros, stay, and go with its size", "[compress][fast]") {
  auto budget = std::make_shared<MemoryBudget>(MemoryBudget{1 << 20, 0});
  Residuals residuals(budget);
  float* const values = residuals.at(1, 100, 10);
  REQUIRE(values != nullptr);
  for (int i = 0; i < 90; ++i) CHECK(values[i] == 0.0F);
  values[5] = 2.0F;
  CHECK(residuals.at(1, 100, 15)[0] == 2.0F);
  CHECK(residuals.norm() == 2.0);
  CHECK(residuals.copy_of(1).values[15] == 2.0F);
  CHECK(residuals.at(1, 50, 15)[0] == 0.0F);  // another tensor now
  CHECK(residuals.stats().dropped == 1);
  CHECK(budget->used == 200);
  residuals.drop(1);
  residuals.drop(1);
  CHECK(residuals.stats().dropped == 2);
  CHECK(budget->used == 0);
  CHECK(residuals.at(0, 100, 0) == nullptr);
  CHECK(residuals.at(1, 100, 100) == nullptr);
}

TEST_CASE("compress/residuals: what the budget does not hold goes without, and is counted", "[compress][fast]") {
  auto budget = std::make_shared<MemoryBudget>(MemoryBudget{1000, 0});
  Residuals first(budget);
  {
    Residuals second(budget);
    CHECK(first.at(1, 200, 0) != nullptr);
    CHECK(second.at(1, 200, 0) == nullptr);
    CHECK(second.at(1, 200, 0) == nullptr);
    CHECK(second.stats().refused == 1);
    CHECK(second.at(2, 50, 0) != nullptr);
    CHECK(budget->used == 1000);
  }
  CHECK(budget->used == 800);
  CHECK(first.restore(1, std::vector<float>(200, 3.0F)));
  CHECK(first.at(1, 200, 199)[0] == 3.0F);
  CHECK_FALSE(first.restore(2, std::vector<float>(200, 3.0F)));
}

TEST_CASE("compress/residuals: what is owed outside of a part goes to another's", "[compress][fast]") {
  auto budget = std::make_shared<MemoryBudget>(MemoryBudget{1 << 20, 0});
  Residuals owed(budget);
  Residuals residuals(budget);
  float* const from = owed.at(1, 10, 0);
  for (int i = 0; i < 10; ++i) from[i] = static_cast<float>(i + 1);
  residuals.at(1, 10, 0)[9] = 0.5F;
  owed.move_to(residuals, 1, {{3, 6}});
  const float* const to = residuals.at(1, 10, 0);
  for (int i = 0; i < 10; ++i) {
    const bool stays = i >= 3 && i < 6;
    CHECK(from[i] == (stays ? static_cast<float>(i + 1) : 0.0F));
    CHECK(to[i] == (stays ? 0.0F : static_cast<float>(i + 1)) + (i == 9 ? 0.5F : 0.0F));
  }
  owed.move_to(residuals, 2, {});  // there is no such tensor
  owed.move_to(residuals, 1, {{2, 4}, {5, 20}});
  CHECK(from[3] == 4.0F);
  CHECK(from[4] == 0.0F);
  CHECK(from[5] == 6.0F);
  owed.move_to(residuals, 1, {});  // all
  CHECK(owed.norm() == 0.0);
  CHECK(residuals.at(1, 10, 0)[4] == 5.0F);
}
