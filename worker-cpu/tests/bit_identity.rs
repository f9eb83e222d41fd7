//! One placement cannot change the result: logits are the same bits for any bands, chunks, batches and threads.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the program is a test")]

mod support;

use spillway_model::file::ModelFile;
use spillway_model::testing::oracles;
use spillway_protocol::frame::LogitRows;
use std::sync::Arc;
use support::{Piece, Pipeline, Rounding, open, same_bits};

/// Attention with and without a gate, recurrent layers, float, 8-bit and mixed K-quant weights, biases.
const FILES: [(&str, Rounding); 8] = [
    ("llama/llama-Q4_K_M", Rounding::COARSE),
    ("llama/llama-Q4_K_M", Rounding::FINE),
    ("qwen2/qwen2-bf16", Rounding::LEAST),
    ("qwen3/qwen3-bf16", Rounding::LEAST),
    ("qwen35/qwen35-bf16", Rounding::LEAST),
    ("qwen35/qwen35-Q4_K_M", Rounding::COARSE),
    ("qwen35/qwen35-Q4_K_M", Rounding::FINE),
    ("qwen35/qwen35-Q8_0", Rounding::COARSE),
];
/// Tokens of a test sequence: more than one KV block and more than one attention partition of 256.
const TOKENS: usize = 300;

/// Runs `check` on every file there is.
fn each_model(check: impl Fn(&str, &Arc<ModelFile>, Rounding)) {
    let Some(dir) = oracles() else { return };
    for (file, rounding) in FILES {
        let path = dir.join(format!("{file}.gguf"));
        check(file, &open(&path), rounding);
    }
}

/// Some ids, different for every seed.
fn sequence(model: &ModelFile, seed: u32, tokens: usize) -> Vec<u32> {
    let vocab = u32::try_from(model.program().vocab).unwrap();
    (0..u32::try_from(tokens).unwrap()).map(|i| (i * 2_654_435 + seed * 97 + i * i * 31) % vocab).collect()
}

#[test]
fn any_bands_give_the_same_bits() {
    each_model(|file, model, rounding| {
        let layers = model.program().layers.len();
        let ids = sequence(model, 1, TOKENS);
        let whole = Pipeline::new(model, &[layers], 1, rounding).score(&ids, TOKENS);
        let third = layers / 3;
        for cuts in [vec![1, layers - 1], vec![third, third, layers - 2 * third], vec![1; layers]] {
            let cut = Pipeline::new(model, &cuts, 1, rounding).score(&ids, TOKENS);
            assert!(same_bits(&whole, &cut), "{file} cut into {cuts:?}");
        }
    });
}

#[test]
fn any_chunks_and_threads_give_the_same_bits() {
    each_model(|file, model, rounding| {
        let layers = model.program().layers.len();
        let ids = sequence(model, 2, TOKENS);
        let whole = Pipeline::new(model, &[layers], 1, rounding).score(&ids, TOKENS);
        for threads in 1..=3 {
            let mut pipeline = Pipeline::new(model, &[layers], threads, rounding);
            // The slot is used again and again: a sequence that starts at 0 must not see the one before it.
            for chunk in [1, 7, 64, TOKENS] {
                let chunked = pipeline.score(&ids, chunk);
                assert!(same_bits(&whole, &chunked), "{file} in chunks of {chunk}, {threads} threads");
            }
        }
    });
}

/// Several sequences in the same steps, prefilling and decoding at different times, against each of them alone.
#[test]
fn any_batch_gives_the_same_bits() {
    each_model(|file, model, rounding| {
        let layers = model.program().layers.len();
        let lengths = [90usize, 41, 3, 66];
        let sequences: Vec<Vec<u32>> =
            (0..4u32).zip(lengths).map(|(seed, n)| sequence(model, seed, n)).collect();
        let mut pipeline = Pipeline::new(model, &[1, layers - 1], 2, rounding);
        let alone: Vec<_> = sequences.iter().map(|ids| pipeline.score(ids, ids.len())).collect();
        let mut together: Vec<Vec<Vec<f32>>> = vec![Vec::new(); sequences.len()];
        // Sequence `s` starts in step `s` and advances by 1, 5, 2 or 17 tokens a step.
        for step in 0usize.. {
            let mut pieces = Vec::new();
            for (slot, (ids, advance)) in sequences.iter().zip([1, 5, 2, 17]).enumerate() {
                let start = (advance * step.saturating_sub(slot)).min(ids.len());
                let ids = &ids[start..(start + advance).min(ids.len())];
                if step >= slot && !ids.is_empty() {
                    let (slot, start) = (u32::try_from(slot).unwrap(), u32::try_from(start).unwrap());
                    pieces.push(Piece { slot, start, ids, logits: LogitRows::All });
                }
            }
            if pieces.is_empty() {
                break;
            }
            let mut rows = pipeline.step(&pieces, &mut ()).into_iter();
            for piece in &pieces {
                together[piece.slot as usize].extend(rows.by_ref().take(piece.ids.len()));
            }
        }
        for (slot, (alone, together)) in alone.iter().zip(&together).enumerate() {
            assert!(same_bits(alone, together), "{file} sequence {slot}");
        }
    });
}

/// Which rows of a step want logits changes nothing but which rows come.
#[test]
fn asking_for_fewer_logits_gives_the_same_bits() {
    each_model(|file, model, rounding| {
        let mut pipeline = Pipeline::whole(model, rounding);
        let ids = sequence(model, 5, 120);
        let all = pipeline.score(&ids, ids.len());
        let last = pipeline.step(&[Piece { slot: 0, start: 0, ids: &ids, logits: LogitRows::Last }], &mut ());
        assert!(same_bits(&all[119..], &last), "{file}");
        let none = pipeline.step(&[Piece { slot: 0, start: 0, ids: &ids, logits: LogitRows::None }], &mut ());
        assert!(none.is_empty(), "{file}");
    });
}
