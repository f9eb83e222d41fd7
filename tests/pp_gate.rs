//! The gate for pipelines over several GPUs (scripts/pp-gate.sh) finds what it is there to find: run with a stand-in for the program
//! that answers as a correct one would, or with one fault at a time.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::{Models, Ran, finish};

/// A program that answers the gate's commands, with the fault that `FAULT` names, and notes in `CALLS` what it was asked.
const STAND_IN: &str = r#"#!/bin/sh
echo "$*" >>"$CALLS"
piped=no
case "$*" in *"--pp 2"*) piped=yes ;; esac
fault() { [ "$FAULT" = "$1" ]; }
case "$1" in
--version) echo "spillway stand-in" ;;
devices)
  second='{"index":1,"name":"b","arch":"gfx1100","integrated":false,"speed":null,"refused":null}'
  fault one-device && second='{"index":1,"name":"b","arch":"gfx1030","integrated":false,"speed":null,"refused":null}'
  echo '{"devices":[{"index":0,"name":"a","arch":"gfx1100","integrated":false,"speed":null,"refused":null},'"$second"']}' ;;
logits)
  fault logits-crash && { echo "error: a worker died" >&2; exit 4; }
  fault no-logits && exit 0
  value=1.5
  [ $piped = yes ] && fault logits-differ && value=1.50001
  case "$*" in *"--chunk 1"*) fault chunks-differ && value=1.50001 ;; esac
  for position in $(seq 0 30); do echo "{\"pos\":$position,\"argmax\":7,\"top\":[[7,$value]]}"; done ;;
run)
  ids=$(seq -s, 1 40)
  fault no-ids && ids=""
  [ $piped = yes ] && fault ids-differ && ids=$(seq -s, 2 41)
  echo "{\"type\":\"done\",\"token_ids\":[$ids]}" ;;
daemon)
  fault daemon-crash && exit 4
  loads=0
  pp=1
  while read -r line; do
    id=$(printf '%s' "$line" | sed 's/.*"id":"\([^"]*\)".*/\1/')
    case "$line" in
    *'"type":"load"'*)
      loads=$((loads + 1))
      case "$line" in *'"pp":2'*) pp=2 ;; esac
      if [ "$id" = l ]; then echo '{"type":"loaded"}'
      elif fault accepts; then echo "{\"type\":\"loaded\",\"id\":\"$id\"}"
      elif fault other-code; then echo "{\"type\":\"error\",\"id\":\"$id\",\"code\":\"internal\"}"
      else echo "{\"type\":\"error\",\"id\":\"$id\",\"code\":\"$id\"}"
      fi ;;
    *'"type":"generate"'*)
      text=word count=40
      [ $pp = 2 ] && fault answers-differ && text=other
      [ "$id" = after ] && fault disturbed && text=other
      fault no-tokens && count=0
      [ $count = 0 ] || fault no-text || echo "{\"type\":\"token\",\"id\":\"$id\",\"text\":\"$text\"}"
      echo "{\"type\":\"done\",\"id\":\"$id\",\"tokens\":$count,\"tok_s\":1}" ;;
    esac
  done ;;
*) exit 2 ;;
esac
"#;

struct Gate {
    models: Models,
    program: PathBuf,
    calls: PathBuf,
}

impl Gate {
    fn new() -> Self {
        let models = Models::new();
        let (program, calls) = (models.path("stand-in"), models.path("calls"));
        fs::write(&program, STAND_IN).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(models.path("m.gguf"), "weights").unwrap();
        Gate { models, program, calls }
    }

    fn script() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/pp-gate.sh")
    }

    /// Runs the gate on a program with a fault.
    fn run_program(&self, program: &Path, fault: &str, args: &[&str]) -> Ran {
        let _ = fs::remove_file(&self.calls);
        let mut command = Command::new("bash");
        command
            .arg(Self::script())
            .args(["--model", self.models.path("m.gguf").to_str().unwrap()])
            .args(args);
        command.env("SPILLWAY_BIN", program).env("FAULT", fault).env("CALLS", &self.calls);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        finish(command.spawn().unwrap(), b"")
    }

    fn run(&self, fault: &str, args: &[&str]) -> Ran {
        self.run_program(&self.program, fault, args)
    }

    /// The commands that the program was asked to run.
    fn asked(&self) -> Vec<String> {
        let calls = fs::read_to_string(&self.calls).unwrap();
        calls.lines().map(|call| call.split(' ').next().unwrap().to_owned()).collect()
    }
}

#[test]
fn a_correct_program_passes() {
    let gate = Gate::new();
    let ran = gate.run("none", &[]);
    assert!(ran.code == Some(0) && ran.stderr.contains("passed"), "{ran:?}");
    let count = |command: &str| gate.asked().iter().filter(|asked| *asked == command).count();
    assert_eq!((count("logits"), count("run"), count("daemon")), (4, 2, 3), "each way once");
}

/// Fault → words of the message. Silence is a fault as well: two empty answers are not the same answer.
#[test]
fn every_fault_is_found() {
    let gate = Gate::new();
    for (fault, said) in [
        ("logits-crash", "logits (one)"),
        ("no-logits", "not 31 positions"),
        ("logits-differ", "pp 1 and pp 2: one and many differ from line 1 on"),
        ("chunks-differ", "single tokens"),
        ("no-ids", "has not 40 tokens"),
        ("ids-differ", "greedy answers of pp 1 and pp 2"),
        ("daemon-crash", "the daemon (pp1)"),
        ("no-tokens", "did not answer \"answer\" with 40 tokens"),
        ("no-text", "with no text"),
        ("answers-differ", "answers of pp 1 and pp 2 differ"),
        ("accepts", "a load that should be refused with pp_beyond_devices"),
        ("other-code", "a load that should be refused with pp_beyond_devices"),
        ("disturbed", "the answer after refused loads differs"),
    ] {
        let ran = gate.run(fault, &["--devices", "0,1"]);
        assert_eq!(ran.code, Some(1), "{fault}: {ran:?}");
        assert!(ran.stderr.contains("FAILED: ") && ran.stderr.contains(said), "{fault}: {}", ran.stderr);
    }
}

#[test]
fn what_is_missing_is_not_a_failure_of_the_program() {
    let gate = Gate::new();
    for (args, said) in [
        (&["--pp", "1"][..], "--pp must be a number from 2 on"),
        (&["--pp"], "--pp needs a value"),
        (&["--fast"], "unknown option --fast"),
        (&["--emulated", "--devices", "0,1"], "exclude one another"),
        (&["--emulated"], "cannot be compiled"),
        (&["--devices", "0,1", "--model", "/nowhere.gguf"], "/nowhere.gguf cannot be read"),
    ] {
        let ran = gate.run("none", args);
        assert!(ran.code == Some(2) && ran.stderr.contains(said), "{args:?}: {ran:?}");
    }
    let ran = gate.run_program(Path::new("/nowhere"), "none", &[]);
    assert!(ran.code == Some(2) && ran.stderr.contains("/nowhere does not run"), "{ran:?}");
}

#[test]
fn too_few_devices_are_skipped_with_a_reason() {
    let gate = Gate::new();
    for (fault, args, said) in [
        ("one-device", &[][..], "fewer than 2 usable GPUs of one kind"),
        ("none", &["--pp", "3"], "fewer than 3 usable GPUs of one kind"),
        ("none", &["--devices", "1"], "names 1 GPUs, fewer than the 2 stages"),
    ] {
        let ran = gate.run(fault, args);
        assert!(ran.code == Some(0) && ran.stderr.contains("skipped: "), "{args:?}: {ran:?}");
        assert!(ran.stderr.contains(said), "{args:?}: {ran:?}");
        assert!(!gate.asked().iter().any(|asked| asked == "logits"), "nothing is run");
    }
}

#[test]
fn a_part_can_be_left_out() {
    let gate = Gate::new();
    let dry = gate.run("no-logits", &["--dry-run"]);
    assert!(dry.code == Some(0) && dry.stderr.contains("would compare logits"), "{dry:?}");
    assert!(dry.stderr.contains("devices 0,1, pp 1 and 2"), "{dry:?}");
    assert_eq!(gate.asked(), ["--version", "devices", "--version"], "nothing is run");
    let ran = gate.run("daemon-crash", &["--skip-end-to-end"]);
    assert!(ran.code == Some(0) && ran.stderr.contains("passed (without the daemon)"), "{ran:?}");
    assert!(!gate.asked().iter().any(|asked| asked == "daemon"));
}
