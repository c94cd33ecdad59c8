// Scratch memory aligned to cache lines, so that no vector load crosses a line.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include "numbers.h"

namespace baton {

template <typename T>
class AlignedBuffer {
  public:
    AlignedBuffer() = default;
    explicit AlignedBuffer(size_t count) { reserve(count); }

    // Ensure room for `count` elements. Growing discards the content.
    void reserve(size_t count) {
        if (count <= capacity_) return;
        const size_t bytes = (count * sizeof(T) + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES * CACHE_LINE_BYTES;
        data_.reset(static_cast<T*>(std::aligned_alloc(CACHE_LINE_BYTES, bytes)));
        if (!data_) throw std::bad_alloc();
        capacity_ = count;
    }

    T* data() const { return data_.get(); }

  private:
    struct Free {
        void operator()(T* data) const { std::free(data); }
    };

    std::unique_ptr<T[], Free> data_;
    size_t capacity_ = 0;
};

}  // namespace baton
