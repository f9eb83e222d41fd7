//! `kernels`: the cache of compiled kernels.

use super::args::{KernelsBuildArgs, KernelsCommand, KernelsListArgs};
use super::failure::Failure;
use super::output;
use crate::planner::bytes;
use serde::Serialize;
use serde_json::json;
use spillway_kernels::hip::SOURCES;
use spillway_worker_gpu::compile::{Arch, Artifact, CachedObject, CompileError, KernelCompiler};
use spillway_worker_gpu::compiler_settings;
use spillway_worker_gpu::devices::survey;
use std::fmt::Write as _;

/// Runs a command on the cache.
pub fn kernels(command: &KernelsCommand) -> Result<(), Failure> {
    let compiler = KernelCompiler::new(compiler_settings());
    match command {
        KernelsCommand::Build(args) => build(&compiler, args),
        KernelsCommand::List(args) => list(&compiler, args),
        KernelsCommand::Clean(args) => clean(&compiler, args),
    }
}

/// What became of the kernels of one architecture.
#[derive(Debug, Serialize)]
struct Built {
    arch: String,
    compiler: String,
    compiled: usize,
    cached: usize,
}

fn build(compiler: &KernelCompiler, args: &KernelsBuildArgs) -> Result<(), Failure> {
    let mut built = Vec::new();
    for arch in architectures(&args.arch)? {
        let artifacts = compiler.compile_all(SOURCES, &arch);
        let artifacts = artifacts.into_iter().collect::<Result<Vec<Artifact>, CompileError>>()?;
        let cached = artifacts.iter().filter(|artifact| artifact.cached).count();
        built.push(Built {
            compiler: compiler.describe(&arch).unwrap_or_else(|_| "none, all cached".to_owned()),
            arch: arch.to_string(),
            compiled: artifacts.len() - cached,
            cached,
        });
    }
    if args.json {
        return output::json(&built);
    }
    let line = |built: &Built| {
        let Built { arch, compiler, compiled, cached } = built;
        format!("{arch}: {compiled} compiled, {cached} in the cache ({compiler})\n")
    };
    output::text(&built.iter().map(line).collect::<String>())
}

/// The architectures that are named, else those of the GPUs of this machine.
fn architectures(named: &[String]) -> Result<Vec<Arch>, Failure> {
    if !named.is_empty() {
        return Ok(named.iter().map(|name| name.parse()).collect::<Result<_, CompileError>>()?);
    }
    let survey = survey(None);
    let mut found = Vec::new();
    for device in &survey.devices {
        let arch: Arch = device.arch.parse()?;
        if !found.contains(&arch) {
            found.push(arch);
        }
    }
    if found.is_empty() {
        let reasons = survey.looked_for.join("; ");
        return Err(Failure::Usage(format!(
            "no GPU to compile for was found ({reasons}); name one with --arch"
        )));
    }
    Ok(found)
}

fn list(compiler: &KernelCompiler, args: &KernelsListArgs) -> Result<(), Failure> {
    let objects = compiler.cached()?;
    if args.json {
        let objects = objects.iter().map(|object| {
            let CachedObject { source, arch, bytes, current, path } = object;
            json!({"source": source, "arch": arch.to_string(), "bytes": bytes, "current": current, "path": path})
        });
        return output::json(&objects.collect::<Vec<_>>());
    }
    let mut text = String::new();
    for object in &objects {
        let age = if object.current { "" } else { "  of another version" };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:<24} {:<18} {:>10}{age}",
            object.source,
            object.arch.to_string(),
            bytes(object.bytes)
        );
    }
    let total = objects.iter().map(|object| object.bytes).sum();
    let _ = writeln!(text, "{} objects, {}", objects.len(), bytes(total));
    output::text(&text)
}

fn clean(compiler: &KernelCompiler, args: &KernelsListArgs) -> Result<(), Failure> {
    let removed = compiler.clean()?;
    if args.json {
        output::json(&json!({"removed_bytes": removed}))
    } else {
        output::text(&format!("{} removed\n", bytes(removed)))
    }
}
