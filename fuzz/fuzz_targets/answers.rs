//! See `lily_fuzz::answers`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lily_fuzz::answers::check(data));
