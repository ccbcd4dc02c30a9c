//! What is said beside the bytes on the socket of a terminal or of a command: text frames of JSON.

use serde::{Deserialize, Serialize};

use super::ExecRequest;
use crate::bridge::Exit;

/// The first byte of a command's binary frames when the rest is of its stdout. A terminal's have no such byte.
pub const STDOUT: u8 = 1;

/// The same for stderr.
pub const STDERR: u8 = 2;

/// What a client says. Its binary frames are what the command reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SocketIn {
    /// The command to run: the first frame on a command's socket, and on no other. Its `stdin` is absent.
    Start(ExecRequest),
    /// The terminal has another size.
    Resize {
        /// Its height.
        rows: u16,
        /// Its width.
        cols: u16,
    },
    /// The command reads no more than what was sent.
    End {},
}

/// What the server says. Nothing follows either.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SocketOut {
    /// The command ended.
    Exited {
        /// How.
        exit: Exit,
        /// From start to end.
        millis: u64,
    },
    /// It could not be run, or we lost sight of it.
    Failed {
        /// What happened, in a word that programs may compare.
        code: String,
        /// In words.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_read_as_one_word_and_what_belongs_to_it() {
        let resize = serde_json::to_string(&SocketIn::Resize { rows: 24, cols: 80 }).unwrap();
        assert_eq!(resize, r#"{"resize":{"rows":24,"cols":80}}"#);
        assert_eq!(serde_json::from_str::<SocketIn>(r#"{"end":{}}"#).unwrap(), SocketIn::End {});
        let exited =
            serde_json::to_string(&SocketOut::Exited { exit: Exit::Code(3), millis: 5 }).unwrap();
        assert_eq!(exited, r#"{"exited":{"exit":{"how":"code","value":3},"millis":5}}"#);
    }
}
