//! `bench`: prompt and decode speed, with what is needed to judge the figures: bytes per token, the share of the memory
//! bandwidth measured in the same run, and how busy the host was.

mod report;

use super::args::BenchArgs;
use super::failure::Failure;
use super::interrupt::Interrupts;
use super::output;
use super::session::Prepared;
use crate::config::Config;
use crate::engine::{BenchRequest, Engine, RequestError};
use crate::open::TextNeed;
use crate::placement::Placement;
use report::{Host, Kind, Report, Test, heading, line, summary};
use spillway_kernels::membw::{self, ReadBandwidth};
use spillway_kernels::pool::ThreadPool;
use spillway_protocol::plan::{Execution, Plan};

/// Tokens of the run that wakes everything up before anything is timed.
const WARM_UP: BenchRequest = BenchRequest { depth: 0, prompt: 16, generate: 4 };

/// One thing to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Case {
    kind: Kind,
    tokens: usize,
    depth: usize,
}

/// Measures and prints.
pub fn bench(args: &BenchArgs, config: &Config) -> Result<(), Failure> {
    let cases = cases(args);
    let Some(longest) = cases.iter().map(|case| case.depth + case.tokens).max() else {
        return Err(Failure::Usage("there is nothing to measure; give -p or -n a number above 0".to_owned()));
    };
    let interrupts = Interrupts::install()?;
    let prepared = Prepared::new(&args.model, TextNeed::Ignored, placement(args, longest, config), config)?;
    let plan = prepared.plan.clone();
    let bandwidth = read_bandwidth(&plan);
    let session = prepared.start(&interrupts, &args.progress)?;
    let before = Host::now();
    if !args.json {
        output::text(&heading(&plan, bandwidth))?;
    }
    let (engine, repetitions, as_json) = (session.engine.clone(), args.repetitions, args.json);
    let measured = interrupts.interruptible(move || {
        measure(&engine, &cases, repetitions, bandwidth, |test| {
            if as_json { Ok(()) } else { output::text(&line(test)) }
        })
    })?;
    let Some(tests) = measured else {
        session.abandon();
        return Err(Failure::Interrupted);
    };
    let tests = tests?;
    let status = session.engine.status();
    let kernels = status.stages.iter().map(|stage| stage.loaded.kernels.clone()).collect();
    let report = Report::new(plan, kernels, bandwidth, before, Host::now(), tests);
    if args.json { output::json(&report) } else { output::text(&summary(&report)) }
}

/// The cross product of what was asked for, without the empty tests.
fn cases(args: &BenchArgs) -> Vec<Case> {
    let of_kind = |kind, sizes: &[usize], depth| {
        let sizes = sizes.to_vec();
        sizes.into_iter().filter(|&tokens| tokens > 0).map(move |tokens| Case { kind, tokens, depth })
    };
    args.depth
        .iter()
        .flat_map(|&depth| {
            of_kind(Kind::Prefill, &args.prompt, depth).chain(of_kind(Kind::Decode, &args.generate, depth))
        })
        .collect()
}

/// One sequence, with room for the longest test unless the user chose otherwise.
fn placement(args: &BenchArgs, longest: usize, config: &Config) -> Placement {
    let mut asked = args.placement.to_single_request(config);
    // Decoding at depth 0 needs a token to start from.
    asked.request.max_seq.get_or_insert((longest + 1).max(WARM_UP.prompt + WARM_UP.generate));
    args.saved.or(asked)
}

/// What the threads of one stage read together; stages take turns unless they have CPUs of their own. None when it
/// cannot be measured, which is no reason not to measure the model.
fn read_bandwidth(plan: &Plan) -> Option<ReadBandwidth> {
    let threads = plan.stages.iter().map(|stage| match stage.execution {
        Execution::Cpu { threads, .. } => Some(threads),
        Execution::Gpu { .. } => None,
    });
    // Where a GPU takes part, the host's memory is not what limits the speed.
    let threads: Option<Vec<usize>> = threads.collect();
    let pool = ThreadPool::new(threads?.into_iter().max().unwrap_or(1));
    let pool = pool.inspect_err(|error| tracing::warn!(%error, "memory bandwidth is not measured")).ok()?;
    let measured = membw::read_bandwidth(&pool, membw::BUFFER_BYTES);
    measured.inspect_err(|error| tracing::warn!(%error, "memory bandwidth is not measured")).ok()
}

fn measure(
    engine: &Engine,
    cases: &[Case],
    repetitions: u32,
    bandwidth: Option<ReadBandwidth>,
    mut show: impl FnMut(&Test) -> Result<(), Failure>,
) -> Result<Vec<Test>, Failure> {
    engine.bench(&WARM_UP)?;
    let mut tests = Vec::with_capacity(cases.len());
    for &Case { kind, tokens, depth } in cases {
        let seconds: Result<Vec<f64>, RequestError> =
            (0..repetitions).map(|_| time(engine, kind, tokens, depth)).collect();
        let test = Test::new(kind, tokens, depth, &seconds?, &engine.plan(), bandwidth);
        show(&test)?;
        tests.push(test);
    }
    Ok(tests)
}

/// Seconds of one run.
fn time(engine: &Engine, kind: Kind, tokens: usize, depth: usize) -> Result<f64, RequestError> {
    match kind {
        Kind::Prefill => {
            engine.bench(&BenchRequest { depth, prompt: tokens, generate: 0 }).map(|times| times.prefill_s)
        }
        Kind::Decode => {
            engine.bench(&BenchRequest { depth, prompt: 0, generate: tokens }).map(|times| times.decode_s)
        }
    }
}
