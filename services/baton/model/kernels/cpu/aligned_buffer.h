// Scratch memory that begins with a line of the caches, so that no vector of a line's length lies across two.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include "numbers.h"

namespace baton {

template <typename T>
class Lines {
  public:
    Lines() = default;
    explicit Lines(size_t count) { make_room(count); }

    // For so many; what was there is lost when it grows.
    void make_room(size_t count) {
        if (count <= room_) return;
        const size_t bytes = (count * sizeof(T) + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
        data_.reset(static_cast<T*>(std::aligned_alloc(LINE_BYTES, bytes)));
        if (!data_) throw std::bad_alloc();
        room_ = count;
    }

    T* data() const { return data_.get(); }

  private:
    struct Free {
        void operator()(T* data) const { std::free(data); }
    };

    std::unique_ptr<T[], Free> data_;
    size_t room_ = 0;
};

}  // namespace baton
