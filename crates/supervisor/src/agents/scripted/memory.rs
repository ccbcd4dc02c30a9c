//! What the scripted agent remembers of its conversation: a file in its home, so that a restored or forked
//! sandbox brings it back. One line per prompt.

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
    prompts: usize,
}

impl Memory {
    /// Opens the conversation of this name below `home`, or begins it.
    pub(super) fn open(home: &Path, conversation: &str) -> io::Result<Self> {
        // It becomes a file's name: nothing but what ids are made of.
        if conversation.is_empty()
            || !conversation.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "that is no name of a conversation",
            ));
        }
        let folder = home.join(".harvest/scripted");
        fs::create_dir_all(&folder)?;
        let path = folder.join(format!("{conversation}.jsonl"));
        let file = File::options().create(true).append(true).read(true).open(path)?;
        // A line without an end was being written when its writer died: that prompt was never begun.
        let prompts = BufReader::new(&file).split(b'\n').map_while(Result::ok);
        let whole = |line: &Vec<u8>| serde_json::from_slice::<serde::de::IgnoredAny>(line).is_ok();
        let prompts = prompts.filter(whole).count();
        Ok(Self { file, prompts })
    }

    /// How many prompts it holds.
    pub(super) const fn prompts(&self) -> usize {
        self.prompts
    }

    /// Adds a prompt.
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
    fn a_conversation_comes_back_and_half_a_line_is_no_prompt() {
        let home = tempfile::tempdir().unwrap();
        let open = || Memory::open(home.path(), "0b5a-1").unwrap();
        let mut memory = open();
        assert_eq!(memory.prompts(), 0);
        memory.add(&PromptId::random(), "one\ntwo").unwrap();
        memory.add(&PromptId::random(), "").unwrap();
        memory.file.write_all(b"{\"prompt\":").unwrap();
        let mut again = open();
        assert_eq!(again.prompts(), 2);
        again.add(&PromptId::random(), "after").unwrap();
        assert_eq!(open().prompts(), 3);
        assert!(Memory::open(home.path(), "../x").is_err());
    }
}
