//! Frames: what is written is what is read, and nothing else is believed.

use super::*;
use proptest::prelude::*;

const LIMITS: FrameLimits = FrameLimits {
    max_spans: 3,
    max_tokens: 50,
    max_seq: 100,
    kv_blocks: 12,
    d_model: 4,
    vocab: 10,
    max_logit_rows: 6,
};

fn shape(slot: u32, start: u32, tokens: u32, logits: LogitRows) -> SpanShape {
    SpanShape { sequence: 1000 + u64::from(slot), state_slot: slot, start, tokens, logits, lifted: false }
}

fn slot(kind: FrameKind) -> Vec<u8> {
    vec![0xa5; LIMITS.slot_bytes(kind)]
}

fn sample() -> StepFrame {
    let mut frame = StepFrame::with_limits(&LIMITS);
    frame.begin(7, 42);
    frame.push(shape(2, 0, 33, LogitRows::All), &[4, 11], &LIMITS).unwrap();
    frame.push(shape(0, 64, 1, LogitRows::Last), &[0, 1, 2], &LIMITS).unwrap();
    frame.push(shape(1, 5, 3, LogitRows::None), &[], &LIMITS).unwrap();
    frame
}

fn same(a: &StepFrame, b: &StepFrame) -> bool {
    let heads = (a.epoch(), a.step(), a.spans()) == (b.epoch(), b.step(), b.spans());
    heads && a.spans().iter().all(|span| a.blocks(span) == b.blocks(span))
}

#[test]
fn a_token_step_survives_the_slot() {
    let frame = sample();
    let ids: Vec<u32> = (0..37).map(|i| i % 10).collect();
    let mut bytes = slot(FrameKind::Tokens);
    write_tokens(&mut bytes, &frame, &ids).unwrap();
    let mut read = StepFrame::default();
    read_step(&bytes, FrameKind::Tokens, &LIMITS, &mut read).unwrap();
    assert!(same(&frame, &read));
    assert_eq!((read.tokens(), read.logit_rows()), (37, 34));
    assert!(read.logit_token_rows().eq(0..34));
    let mut back = vec![0; 37];
    read_tokens(&bytes, &read, &LIMITS, &mut back).unwrap();
    assert_eq!(ids, back);
}

#[test]
fn a_residual_step_survives_the_slot_bit_for_bit() {
    let frame = sample();
    let rows: Vec<f32> = (0..37 * 4u32).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9))).collect();
    let mut bytes = slot(FrameKind::Residual);
    write_residual(&mut bytes, &frame, 4, &rows).unwrap();
    let mut read = StepFrame::default();
    read_step(&bytes, FrameKind::Residual, &LIMITS, &mut read).unwrap();
    let mut back = vec![0.0; 37 * 4];
    read_residual(&bytes, &read, &LIMITS, &mut back).unwrap();
    assert!(rows.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits()));
}

/// Rows on a device: the head says so, nobody reads them from the slot, and only residual rows may lie there.
#[test]
fn a_residual_step_may_have_its_rows_elsewhere() {
    let frame = sample();
    let mut bytes = slot(FrameKind::Residual);
    let mut read = StepFrame::default();
    write_residual_head(&mut bytes, &frame, 4, Place::Device).unwrap();
    read_step(&bytes, FrameKind::Residual, &LIMITS, &mut read).unwrap();
    assert!(same(&frame, &read) && read.place() == Place::Device);
    assert_eq!(residual_offset(&read).unwrap_err().code(), "frame_inconsistent");
    let fetched = read_residual(&bytes, &read, &LIMITS, &mut [0.0; 148]);
    assert_eq!(fetched.unwrap_err().code(), "frame_inconsistent");
    let offset = write_residual_head(&mut bytes, &frame, 4, Place::Slot).unwrap();
    read_step(&bytes, FrameKind::Residual, &LIMITS, &mut read).unwrap();
    assert_eq!((read.place(), residual_offset(&read).unwrap()), (Place::Slot, offset));
    const PLACE: usize = 48;
    for (kind, place) in [(FrameKind::Residual, 2), (FrameKind::Tokens, 1)] {
        match kind {
            FrameKind::Tokens => write_tokens(&mut bytes, &frame, &[0; 37]).unwrap(),
            _ => write_residual(&mut bytes, &frame, 4, &[0.0; 148]).unwrap(),
        }
        bytes[PLACE] = place;
        let wrong = read_step(&bytes, kind, &LIMITS, &mut read);
        assert_eq!(wrong.unwrap_err().code(), "frame_inconsistent", "{kind:?}");
    }
}

#[test]
fn logits_survive_the_slot() {
    let about = LogitsFrame { epoch: 7, step: 42, first_row: 6, rows: 2, last: true };
    let logits: Vec<f32> = (0..20u8).map(f32::from).collect();
    let mut bytes = slot(FrameKind::Logits);
    write_logits(&mut bytes, &about, 10, &logits).unwrap();
    assert_eq!(read_logits(&bytes, &LIMITS).unwrap(), about);
    let mut row = vec![0.0; 10];
    read_logit_row(&bytes, &about, 1, &LIMITS, &mut row).unwrap();
    assert_eq!(row, logits[10..]);
    assert_eq!(read_logit_row(&bytes, &about, 2, &LIMITS, &mut row).unwrap_err().code(), "frame_limit");
    let nothing = LogitsFrame { first_row: 0, rows: 0, ..about };
    write_logits(&mut bytes, &nothing, 10, &[]).unwrap();
    assert_eq!(read_logits(&bytes, &LIMITS).unwrap(), nothing);
}

#[test]
fn spans_that_break_a_limit_are_refused_on_both_sides() {
    use LogitRows::Last;
    let cases: [(SpanShape, &[u32], &str); 8] = [
        (shape(0, 0, 0, Last), &[], "frame_inconsistent"),
        (shape(0, 0, 51, Last), &[0, 1], "frame_limit"),
        (shape(0, 90, 11, Last), &[0, 1, 2, 3], "frame_limit"),
        (shape(0, u32::MAX, u32::MAX, Last), &[], "frame_limit"),
        (shape(3, 0, 1, Last), &[0], "frame_limit"),
        (shape(0, 0, 33, Last), &[0], "frame_inconsistent"),
        (shape(0, 0, 1, Last), &[0, 1], "frame_inconsistent"),
        (shape(0, 0, 1, Last), &[12], "frame_limit"),
    ];
    let wide =
        FrameLimits { max_spans: 9, max_tokens: 5000, max_seq: usize::MAX >> 8, kv_blocks: 99, ..LIMITS };
    for (bad, blocks, code) in cases {
        let mut frame = StepFrame::default();
        frame.begin(1, 1);
        assert_eq!(frame.push(bad, blocks, &LIMITS).unwrap_err().code(), code, "{bad:?} {blocks:?}");
        // A sender with wider limits gets it into a slot; the receiver refuses it all the same.
        if frame.push(bad, blocks, &wide).is_ok() {
            let mut bytes = vec![0; 100_000];
            let ids = vec![0; frame.tokens()];
            write_tokens(&mut bytes, &frame, &ids).unwrap();
            let read = read_step(&bytes, FrameKind::Tokens, &LIMITS, &mut StepFrame::default());
            assert_eq!(read.unwrap_err().code(), code, "{bad:?} {blocks:?}");
        }
    }
    let mut frame = StepFrame::default();
    frame.push(shape(1, 0, 1, Last), &[0], &LIMITS).unwrap();
    assert_eq!(frame.push(shape(1, 0, 1, Last), &[1], &LIMITS).unwrap_err().code(), "frame_inconsistent");
}

#[test]
fn wrong_kinds_widths_ids_and_buffers_are_refused() {
    let frame = sample();
    let mut bytes = slot(FrameKind::Residual);
    let mut read = StepFrame::default();
    assert_eq!(read_logits(&bytes, &LIMITS).unwrap_err().code(), "frame_magic");
    write_tokens(&mut bytes, &frame, &[0; 37]).unwrap();
    let wrong = read_step(&bytes, FrameKind::Residual, &LIMITS, &mut read);
    assert_eq!(wrong.unwrap_err().code(), "frame_kind");
    write_residual(&mut bytes, &frame, 2, &[0.0; 74]).unwrap();
    let wrong = read_step(&bytes, FrameKind::Residual, &LIMITS, &mut read);
    assert_eq!(wrong.unwrap_err().code(), "frame_inconsistent");
    write_tokens(&mut bytes, &frame, &[10; 37]).unwrap();
    read_step(&bytes, FrameKind::Tokens, &LIMITS, &mut read).unwrap();
    assert_eq!(read_tokens(&bytes, &read, &LIMITS, &mut [0; 37]).unwrap_err().code(), "frame_limit");
    assert_eq!(read_tokens(&bytes, &read, &LIMITS, &mut [0; 36]).unwrap_err().code(), "frame_buffer");
    assert_eq!(write_tokens(&mut bytes, &frame, &[0; 36]).unwrap_err().code(), "frame_buffer");
    assert_eq!(write_tokens(&mut vec![0; 100], &frame, &[0; 37]).unwrap_err().code(), "frame_slot_too_small");
}

#[test]
fn reading_a_step_again_does_not_allocate() {
    let frame = sample();
    let mut bytes = slot(FrameKind::Tokens);
    write_tokens(&mut bytes, &frame, &[0; 37]).unwrap();
    let mut read = StepFrame::with_limits(&LIMITS);
    read_step(&bytes, FrameKind::Tokens, &LIMITS, &mut read).unwrap();
    let at = read.spans().as_ptr();
    read_step(&bytes, FrameKind::Tokens, &LIMITS, &mut read).unwrap();
    assert_eq!(at, read.spans().as_ptr());
}

/// A reader that was handed anything: it must end in a value or an error.
fn read_everything(bytes: &Vec<u8>) {
    let mut frame = StepFrame::default();
    if read_step(bytes, FrameKind::Tokens, &LIMITS, &mut frame).is_ok() {
        assert!((1..=LIMITS.max_tokens).contains(&frame.tokens()));
        let _ = read_tokens(bytes, &frame, &LIMITS, &mut vec![0; frame.tokens()]);
    }
    if read_step(bytes, FrameKind::Residual, &LIMITS, &mut frame).is_ok() {
        let _ = read_residual(bytes, &frame, &LIMITS, &mut vec![0.0; frame.tokens() * LIMITS.d_model]);
    }
    if let Ok(about) = read_logits(bytes, &LIMITS) {
        assert!(about.rows <= LIMITS.max_logit_rows);
        let _ = read_logit_row(bytes, &about, 0, &LIMITS, &mut [0.0; LIMITS.vocab]);
    }
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..700)) {
        read_everything(&bytes);
    }

    /// Damage to a valid frame gets past the magic and reaches every check.
    #[test]
    fn damaged_frames_never_panic(
        kind in 0..2usize,
        damage in prop::collection::vec((0usize..200, any::<u8>()), 1..8),
        keep in 0usize..1200,
    ) {
        let mut bytes = slot(FrameKind::Residual);
        match kind {
            0 => write_tokens(&mut bytes, &sample(), &[3; 37]).unwrap(),
            _ => write_residual(&mut bytes, &sample(), 4, &[1.0; 148]).unwrap(),
        }
        for (at, value) in damage {
            bytes[at] = value;
        }
        bytes.truncate(keep);
        read_everything(&bytes);
    }

    /// Any step that `push` accepts comes back equal.
    #[test]
    fn accepted_steps_survive(
        starts in prop::collection::vec((0u32..99, 1u32..40, 0u32..3, any::<bool>()), 1..4),
    ) {
        let mut frame = StepFrame::default();
        frame.begin(3, 9);
        for (slot, (start, tokens, logits, table)) in (0..).zip(starts) {
            let logits = [LogitRows::None, LogitRows::Last, LogitRows::All][logits as usize];
            let count = if table { (start + tokens).div_ceil(32) } else { 0 };
            let blocks: Vec<u32> = (0..count).collect();
            let _ = frame.push(shape(slot, start, tokens, logits), &blocks, &LIMITS);
        }
        prop_assume!(frame.tokens() > 0);
        let mut bytes = slot(FrameKind::Tokens);
        write_tokens(&mut bytes, &frame, &vec![1; frame.tokens()]).unwrap();
        let mut read = StepFrame::default();
        read_step(&bytes, FrameKind::Tokens, &LIMITS, &mut read).unwrap();
        prop_assert!(same(&frame, &read));
    }
}

/// Spans for which layers are lifted are told apart on the other side, and a frame that has them elsewhere than at its end is not
/// believed.
#[test]
fn lifted_spans_come_last() {
    let lifted = |shape: SpanShape| SpanShape { lifted: true, ..shape };
    let mut frame = StepFrame::with_limits(&LIMITS);
    frame.begin(7, 42);
    frame.push(shape(2, 0, 3, LogitRows::None), &[], &LIMITS).unwrap();
    frame.push(lifted(shape(0, 0, 4, LogitRows::Last)), &[], &LIMITS).unwrap();
    let late = frame.push(shape(1, 0, 1, LogitRows::None), &[], &LIMITS).unwrap_err();
    assert!(late.to_string().contains("lifted"), "{late}");
    let mut bytes = slot(FrameKind::Tokens);
    write_tokens(&mut bytes, &frame, &[0; 7]).unwrap();
    let mut read = StepFrame::default();
    read_step(&bytes, FrameKind::Tokens, &LIMITS, &mut read).unwrap();
    assert!(same(&frame, &read));
    let (here, away, first) = read.by_lift();
    assert_eq!((here.len(), away.len(), first), (1, 1, 3));
    // The flag is the last word of a record of 32 bytes; records follow the header.
    for (record, flag) in [(0, 1u32), (1, 2)] {
        let mut wrong = bytes.clone();
        wrong[64 + 32 * record + 28..][..4].copy_from_slice(&flag.to_ne_bytes());
        let refused = read_step(&wrong, FrameKind::Tokens, &LIMITS, &mut read);
        assert_eq!(
            refused.is_err(),
            flag == 2,
            "record {record}: two lifted spans are fine, an unknown way is not"
        );
    }
    let none = sample();
    assert_eq!((none.by_lift().0.len(), none.by_lift().1.len(), none.by_lift().2), (3, 0, 37));
}
