//! The scripted agent's conversation: a file in its home with one line per prompt, so that a
//! restored or forked sandbox has it too.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Write},
    path::Path,
};

use harvest_proto::PromptId;
use serde_json::json;

/// A conversation on disk.
#[derive(Debug)]
pub(super) struct Memory {
    file: File,
    /// The number of prompts.
    pub(super) prompts: usize,
}

impl Memory {
    /// Opens or creates the conversation below `home`.
    pub(super) fn open(home: &Path, conversation: &str) -> io::Result<Self> {
        // The id becomes a file name.
        if conversation.is_empty()
            || !conversation.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "invalid conversation id"));
        }
        let folder = home.join(".harvest/scripted");
        fs::create_dir_all(&folder)?;
        let path = folder.join(format!("{conversation}.jsonl"));
        let file = File::options().create(true).append(true).read(true).open(path)?;
        // An incomplete line was being written when the process died: that prompt never started.
        let prompts = BufReader::new(&file).split(b'\n').map_while(Result::ok);
        let complete =
            |line: &Vec<u8>| serde_json::from_slice::<serde::de::IgnoredAny>(line).is_ok();
        let prompts = prompts.filter(complete).count();
        Ok(Self { file, prompts })
    }

    pub(super) fn add(&mut self, prompt: &PromptId, text: &str) -> io::Result<()> {
        let line = format!("\n{}\n", json!({ "prompt": prompt, "text": text }));
        self.file.write_all(line.as_bytes())?;
        self.prompts += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reopened_conversation_ignores_incomplete_lines() {
        let home = tempfile::tempdir().unwrap();
        let open = || Memory::open(home.path(), "0b5a-1").unwrap();
        let mut memory = open();
        assert_eq!(memory.prompts, 0);
        memory.add(&PromptId::random(), "one\ntwo").unwrap();
        memory.add(&PromptId::random(), "").unwrap();
        memory.file.write_all(b"{\"prompt\":").unwrap();
        let mut again = open();
        assert_eq!(again.prompts, 2);
        again.add(&PromptId::random(), "after").unwrap();
        assert_eq!(open().prompts, 3);
        assert!(Memory::open(home.path(), "../x").is_err());
    }
}
