//! Plays a script: each block of it, one after the other.

use std::{fs, io, path::Path, time::Duration};

use harvest_proto::script::{self, Block, ErrorStep, Script};
use serde_json::{Value, json};

use super::{
    program::{Program, Stop},
    shell,
    wire::FromProgram,
};

type Played = Result<(), Stop>;

/// Plays the script of this prompt; `earlier` prompts came before it.
pub(super) async fn prompt(program: &mut Program, text: &str, earlier: usize) -> Played {
    let script = match Script::find(text) {
        Ok(Some(script)) => script,
        Ok(None) => return echo(program, text, earlier),
        Err(error) => return Err(Stop::Failed(error.to_string())),
    };
    for one in script.into_blocks() {
        block(program, one, earlier).await?;
    }
    Ok(())
}

fn echo(program: &Program, text: &str, earlier: usize) -> Played {
    let first: String = text.lines().next().unwrap_or_default().chars().take(200).collect();
    let remembered = script::remembered(earlier);
    let text = format!(
        "This is the scripted agent: it plays the script in a prompt, and this prompt has none. You said: \
         {first}\n{remembered}\n"
    );
    Ok(program.say(&FromProgram::Text { text })?)
}

async fn block(program: &mut Program, block: Block, earlier: usize) -> Played {
    match block {
        Block::Text { text, chunks, delay_ms } => {
            for text in script::pieces(&text, chunks) {
                if delay_ms > 0 {
                    program.wait(Duration::from_millis(delay_ms)).await?;
                }
                program.say(&FromProgram::Text { text })?;
            }
        }
        Block::Thinking(text) => program.say(&FromProgram::Thought { text })?,
        Block::History => program.say(&FromProgram::Text { text: script::remembered(earlier) })?,
        Block::Bash(command) => {
            let call = begin(program, "Bash", json!({ "command": command }))?;
            let (ok, output) = shell::run(program, &command).await?;
            program.say(&FromProgram::Result { call, ok, output })?;
        }
        Block::Ask { question, options } => ask(program, question, options).await?,
        Block::Hang { seconds } => program.wait(Duration::from_secs_f64(seconds)).await?,
        Block::Error(error) => fail(program, &error)?,
        Block::Drop { times } => retries(program, times, None)?,
        Block::Usage(_) => {}
        Block::Crash(code) => std::process::exit(i32::from(code)),
        Block::Raw(line) => program.write(format!("{line}\n").as_bytes())?,
        Block::Garbage(bytes) => program.write(&[vec![0xff; bytes], vec![b'\n']].concat())?,
        Block::Stderr(line) => eprintln!("{line}"),
        Block::Flood { events, bytes } => flood(program, events, bytes)?,
        file => tool(program, file)?,
    }
    Ok(())
}

fn begin(program: &mut Program, name: &str, input: Value) -> Result<String, Stop> {
    program.calls += 1;
    // Unlike those of an earlier process of the same conversation.
    let call = format!("call_{}_{}", program.memory.prompts(), program.calls);
    program.say(&FromProgram::Tool { call: call.clone(), name: name.to_owned(), input })?;
    Ok(call)
}

fn tool(program: &mut Program, block: Block) -> Played {
    let (name, input) = match &block {
        Block::Write { path, content } => {
            ("Write", json!({ "file_path": path, "content": content }))
        }
        Block::Read(path) => ("Read", json!({ "file_path": path })),
        Block::Edit { path, old, new } => {
            ("Edit", json!({ "file_path": path, "old_string": old, "new_string": new }))
        }
        Block::Tool { name, input } => (name.as_str(), input.clone()),
        _ => return Ok(()),
    };
    let call = begin(program, name, input)?;
    let (ok, output) = match carry_out(block) {
        Ok(output) => (true, output),
        Err(error) => (false, error.to_string()),
    };
    Ok(program.say(&FromProgram::Result { call, ok, output })?)
}

fn carry_out(block: Block) -> io::Result<String> {
    match block {
        Block::Write { path, content } => {
            if let Some(folder) = Path::new(&path).parent() {
                fs::create_dir_all(folder)?;
            }
            fs::write(&path, content).map(|()| format!("wrote {path}"))
        }
        Block::Read(path) => Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned()),
        Block::Edit { path, old, new } => {
            let text = fs::read_to_string(&path)?;
            if !text.contains(&old) {
                return Err(io::Error::new(
                    io::ErrorKind::NotFound,
                    format!("{path} does not hold that text"),
                ));
            }
            fs::write(&path, text.replacen(&old, &new, 1)).map(|()| format!("edited {path}"))
        }
        _ => Ok("the scripted agent only pretends to have this tool".to_owned()),
    }
}

async fn ask(program: &mut Program, question: String, options: Vec<String>) -> Played {
    program.calls += 1;
    let request = format!("ask_{}_{}", program.memory.prompts(), program.calls);
    program.say(&FromProgram::Ask { request: request.clone(), question, options })?;
    let answer = program.answered(&request).await?;
    Ok(program.say(&FromProgram::Text { text: format!("The answer is {answer}.") })?)
}

// An overloaded service is asked again; one that refuses is not.
fn fail(program: &Program, error: &ErrorStep) -> Played {
    if error.status == 429 || error.status >= 500 {
        return retries(program, error.times, Some(error.status));
    }
    Err(Stop::Failed(format!("API Error: {} {}", error.status, error.message)))
}

fn retries(program: &Program, times: u32, status: Option<u16>) -> Played {
    for attempt in 1..=times {
        program.say(&FromProgram::Retry { attempt, status })?;
    }
    Ok(())
}

fn flood(program: &mut Program, events: usize, bytes: usize) -> Played {
    let output = "x".repeat(bytes);
    for _ in 0..events {
        program.calls += 1;
        let call = format!("flood_{}_{}", program.memory.prompts(), program.calls);
        program.say(&FromProgram::Result { call, ok: true, output: output.clone() })?;
    }
    Ok(())
}
