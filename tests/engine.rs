//! The engine with real worker processes: one placement cannot change a result, nor can what runs beside it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/engine.rs"]
mod fixture;

use fixture::{answer, greedy, logits, open, options, placement, prompt, start, submit, tiny, try_start};
use spillway::engine::{
    BenchRequest, EngineOptions, ErrorClass, FinishReason, GenerateEvent, GenerateRequest, RequestError,
    ScoreRequest,
};
use spillway::planner::PlacementRequest;
use spillway::sampler::SamplingParams;
use spillway_model::testing::{TinyModel, oracles};
use std::ops::ControlFlow;
use std::path::Path;

/// Bands of 1, 2, 3 and one layer per worker, prompts in pieces of 1, 7, 64 and all: every bit of every logit is the same.
fn placements_agree(path: &Path, length: u32) {
    let layers = open(path).summary().layers.len();
    let ids = prompt(3, length);
    let mut reference = None;
    for workers in [1, 2, 3, layers] {
        let engine = start(path, &placement(workers));
        for chunk in [1, 7, 64, ids.len()] {
            let rows = logits(&engine, &ids, chunk);
            assert_eq!(rows.len(), ids.len());
            let expected = reference.get_or_insert_with(|| rows.clone());
            assert!(rows == *expected, "{}: {workers} workers, chunks of {chunk}", path.display());
        }
        engine.shutdown();
    }
}

#[test]
fn placement_and_chunks_do_not_change_a_bit() {
    for architecture in ["llama", "qwen2", "qwen3", "qwen35"] {
        placements_agree(&tiny(&TinyModel::new(architecture)).path, 100);
    }
    placements_agree(&tiny(&TinyModel::new("qwen35").q8_0().layers(8)).path, 100);
}

#[test]
fn placement_does_not_change_a_bit_of_real_quantised_files() {
    let Some(folder) = oracles() else { return };
    for file in ["qwen35/qwen35-Q4_K_M.gguf", "llama/llama-Q8_0.gguf"] {
        placements_agree(&folder.join(file), 70);
    }
}

/// A request as different users would send it.
fn varied(index: u32) -> GenerateRequest {
    let sampling = SamplingParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        repeat_penalty: 1.1,
        seed: u64::from(index),
        ..Default::default()
    };
    let sampling = if index.is_multiple_of(2) { sampling } else { SamplingParams::default() };
    GenerateRequest { sampling, ..greedy(&prompt(index + 1, 5 + 40 * index), 24) }
}

#[test]
fn answers_do_not_depend_on_what_runs_beside_them() {
    for architecture in ["llama", "qwen35"] {
        let file = tiny(&TinyModel::new(architecture));
        let request = PlacementRequest { chunk: Some(48), ..placement(3) };
        let alone: Vec<_> = {
            let engine = start(&file.path, &request);
            (0..5).map(|index| answer(&engine, varied(index))).collect()
        };
        // One step in the pipeline, and one per stage.
        for steps_in_flight in [1, 3] {
            let options = EngineOptions { steps_in_flight: Some(steps_in_flight), ..options() };
            let engine = try_start(&open(&file.path), &request, options).unwrap();
            // One request more than there are slots, all at once.
            let together: Vec<_> = (0..5).map(|index| submit(&engine, varied(index))).collect();
            for (alone, together) in alone.iter().zip(&together) {
                let together = together.done();
                assert_eq!(
                    (&alone.token_ids, &alone.text),
                    (&together.token_ids, &together.text),
                    "{architecture}"
                );
                assert_eq!(alone.token_ids.len(), 24);
            }
        }
    }
}

#[test]
fn a_continued_slot_gives_the_answer_of_a_fresh_one() {
    for architecture in ["llama", "qwen35"] {
        let file = tiny(&TinyModel::new(architecture));
        let engine = start(&file.path, &placement(2));
        let first = answer(&engine, greedy(&prompt(1, 40), 16));
        let mut longer = first.prompt_ids.clone();
        longer.extend(&first.token_ids);
        longer.extend([7, 8, 9]);
        let continued = answer(&engine, greedy(&longer, 16));
        assert_eq!(continued.timings.cached_tokens, 40 + 15, "the last token was chosen but not run");
        let fresh = answer(&start(&file.path, &placement(1)), greedy(&longer, 16));
        assert_eq!(
            (fresh.timings.cached_tokens, fresh.token_ids),
            (0, continued.token_ids),
            "{architecture}"
        );
    }
}

#[test]
fn generated_tokens_are_those_that_scoring_finds_likeliest() {
    let file = tiny(&TinyModel::new("qwen3"));
    let engine = start(&file.path, &placement(2));
    let completion = answer(&engine, greedy(&prompt(2, 30), 12));
    let ids: Vec<u32> = completion.prompt_ids.iter().chain(&completion.token_ids).copied().collect();
    let rows = logits(&engine, &ids, 16);
    for (offset, &token) in completion.token_ids.iter().enumerate() {
        let row: Vec<f32> = rows[29 + offset].iter().map(|&bits| f32::from_bits(bits)).collect();
        let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(row.iter().position(|&value| value == best), Some(token as usize));
    }
}

#[test]
fn events_come_in_order_and_pieces_are_the_text() {
    let file = tiny(&TinyModel::new("llama"));
    let engine = start(&file.path, &placement(1));
    let running = submit(&engine, greedy(&prompt(1, 10), 20));
    let (mut ids, mut text) = (Vec::new(), String::new());
    assert_eq!(running.events.recv().unwrap(), GenerateEvent::Accepted);
    assert_eq!(running.events.recv().unwrap(), GenerateEvent::Started { cached_tokens: 0 });
    let completion = loop {
        match running.events.recv().unwrap() {
            GenerateEvent::Token { id, text: piece, pos } => {
                assert_eq!(pos, 10 + ids.len());
                ids.push(id);
                text.push_str(&piece);
            }
            GenerateEvent::Text { text: piece } => text.push_str(&piece),
            GenerateEvent::Done(completion) => break completion,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((completion.token_ids, completion.text), (ids, text));
    assert_eq!(completion.finish_reason, FinishReason::Length);
    let timings = completion.timings;
    assert_eq!((timings.prompt_tokens, timings.generated_tokens), (10, 20));
    assert!(timings.ttft_ms > 0.0 && timings.decode_ms > 0.0 && timings.decode_tok_s() > 0.0);
}

#[test]
fn a_stop_string_ends_the_answer_and_is_not_part_of_it() {
    let file = tiny(&TinyModel::new("llama"));
    let engine = start(&file.path, &placement(1));
    let whole = answer(&engine, greedy(&prompt(1, 10), 40));
    let characters: Vec<char> = whole.text.chars().collect();
    let stop: String = characters[characters.len() / 2..][..3].iter().collect();
    let before = &whole.text[..whole.text.find(&stop).unwrap()];
    let request = GenerateRequest { stop: vec![stop.clone()], ..greedy(&prompt(1, 10), 40) };
    let stopped = answer(&engine, request);
    assert_eq!((stopped.text.as_str(), stopped.finish_reason), (before, FinishReason::StopString));
    assert!(whole.token_ids.starts_with(&stopped.token_ids));
}

#[test]
fn an_end_token_ends_the_answer_unless_it_is_to_be_ignored() {
    let file = tiny(&TinyModel::new("llama"));
    let model = open(&file.path);
    let engine = start(&file.path, &placement(1));
    let end = model.tokenizer().unwrap().end_of_generation()[0];
    let sampling = SamplingParams { logit_bias: vec![(end, 1e6)], ..Default::default() };
    let request = GenerateRequest { sampling, ignore_eos: false, ..greedy(&prompt(1, 10), 5) };
    let ended = answer(&engine, request.clone());
    assert_eq!((ended.finish_reason, ended.token_ids.len()), (FinishReason::EndOfText, 0));
    let ignored = answer(&engine, GenerateRequest { ignore_eos: true, ..request });
    assert_eq!((ignored.finish_reason, ignored.token_ids), (FinishReason::Length, vec![end; 5]));
    assert_eq!(ignored.text, "", "control tokens are no text");
}

fn refused(request: GenerateRequest, path: &Path) -> RequestError {
    start(path, &placement(1)).submit(request, Box::new(|event| panic!("{event:?}"))).unwrap_err()
}

#[test]
fn requests_that_cannot_run_are_refused_before_they_start() {
    let file = tiny(&TinyModel::new("llama"));
    let too_long = refused(greedy(&prompt(1, 257), 1), &file.path);
    assert_eq!((too_long.code, too_long.class), ("context_length_exceeded", ErrorClass::ContextLength));
    assert!(too_long.message.contains("257") && too_long.message.contains("256"), "{too_long}");
    let table = [
        ("token_out_of_range", greedy(&[1, 9999], 1)),
        ("invalid_stop", GenerateRequest { stop: vec![String::new()], ..greedy(&[1], 1) }),
        (
            "invalid_sampling_parameter",
            GenerateRequest {
                sampling: SamplingParams { top_p: 2.0, ..Default::default() },
                ..greedy(&[1], 1)
            },
        ),
    ];
    for (code, request) in table {
        let error = refused(request, &file.path);
        assert_eq!((error.code, error.class, error.retryable), (code, ErrorClass::Validation, false));
    }
}

#[test]
fn the_answer_is_clipped_to_the_context() {
    let file = tiny(&TinyModel::new("qwen3"));
    let engine = start(&file.path, &placement(2));
    let clipped = answer(&engine, greedy(&prompt(1, 250), 1000));
    assert_eq!((clipped.token_ids.len(), clipped.finish_reason), (6, FinishReason::Length));
    let full = answer(&engine, greedy(&prompt(1, 256), 10));
    assert_eq!((full.token_ids.len(), full.finish_reason), (0, FinishReason::Length));
    let none = answer(&engine, greedy(&prompt(1, 4), 0));
    assert_eq!((none.token_ids.len(), none.finish_reason), (0, FinishReason::Length));
}

#[test]
fn scoring_can_be_broken_off_and_leaves_nothing_behind() {
    let file = tiny(&TinyModel::new("qwen3"));
    let engine = start(&file.path, &placement(2));
    let request = ScoreRequest { ids: prompt(1, 200), chunk: Some(8) };
    let mut rows = 0;
    let result = engine.score(&request, &mut |_, _| {
        rows += 1;
        if rows == 10 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!((result, rows), (Ok(()), 10));
    assert_eq!(logits(&engine, &prompt(1, 20), 20).len(), 20);
    assert_eq!(engine.status().kv_blocks_used, 0);
}

#[test]
fn a_bench_is_timed_and_leaves_answers_alone() {
    let file = tiny(&TinyModel::new("qwen35"));
    let engine = start(&file.path, &placement(2));
    let before = answer(&engine, greedy(&prompt(1, 30), 8));
    let result = engine.bench(&BenchRequest { depth: 64, prompt: 100, generate: 20 }).unwrap();
    assert!(result.prefill_s > 0.0 && result.decode_s > 0.0);
    let after = answer(&engine, greedy(&prompt(1, 30), 8));
    assert_eq!((after.timings.cached_tokens, after.token_ids), (0, before.token_ids));
    let too_long = engine.bench(&BenchRequest { depth: 200, prompt: 57, generate: 0 }).unwrap_err();
    assert_eq!(too_long.code, "context_length_exceeded");

    let status = engine.status();
    assert!(status.ready && status.stages.len() == 2 && status.tokens_done > 0);
    for stage in status.stages {
        assert!(stage.steps > 0 && stage.busy_ns > 0 && !stage.loaded.kernels.is_empty());
    }
}

/// A plan is only worth its refusals if workers keep to it.
#[test]
fn workers_allocate_what_the_plan_charges() {
    let folder = oracles();
    let files = ["qwen35/qwen35-Q4_K_M.gguf", "llama/llama-bf16.gguf"];
    let real = folder.iter().flat_map(|folder| files.map(|file| folder.join(file)));
    let tiny = tiny(&TinyModel::new("qwen35").q8_0());
    for path in real.chain([tiny.path.clone()]) {
        let engine = start(&path, &placement(2));
        for (planned, stage) in engine.plan().stages.iter().zip(engine.status().stages) {
            let (charged, held) = (planned.bytes.private() - planned.bytes.rings, stage.loaded.host_bytes);
            assert!(
                held <= charged && held * 10 >= charged * 9,
                "{}: charged {charged}, allocated {held}: {:?}",
                path.display(),
                planned.bytes
            );
        }
    }
}
