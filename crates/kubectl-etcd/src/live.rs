//! Parses the output of `etcdctl endpoint status -w json`. Performs no I/O.

use serde_json::Value;

/// The status that one member has reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveMember {
    /// Member ID, in hexadecimal without leading zeros, as in `status.memberDetails`.
    pub id: String,
    /// The client URL at which the member answered.
    pub endpoint: String,
    /// Member ID of the leader in hexadecimal. Empty if the member knows no leader.
    pub leader: String,
    /// Version of etcd that the member runs.
    pub version: String,
    /// Raft term of the member.
    pub term: u64,
    /// Newest revision of the member.
    pub revision: u64,
    /// Index of the last entry in the Raft log.
    pub raft_index: u64,
    /// Index of the last log entry that the member has applied.
    pub applied_index: u64,
    /// Size of the database file in bytes.
    pub db_size: u64,
    /// Bytes of the database file that contain data.
    pub db_in_use: u64,
    /// Maximum size of the database in bytes. `None` before etcd 3.6.
    pub quota: Option<u64>,
    /// Whether the member is a learner, which has no vote.
    pub is_learner: bool,
    /// Errors that the member reports, such as alarms.
    pub errors: Vec<String>,
}

/// Parses the output of etcdctl, which lists only the members that responded. Returns `None` if the output is not such
/// a list.
pub fn parse(output: &str) -> Option<Vec<LiveMember>> {
    let begin = output.find('[')?;
    let value: Value = serde_json::from_str(output.get(begin..)?.trim()).ok()?;
    value.as_array()?.iter().map(member).collect()
}

fn member(value: &Value) -> Option<LiveMember> {
    let status = value.get("Status")?;
    let header = status.get("header")?;
    let hex = |value: &Value, key: &str| {
        let id = number(value, key).unwrap_or_default();
        if id == 0 {
            String::new()
        } else {
            format!("{id:x}")
        }
    };
    let of = |key: &str| number(status, key).unwrap_or_default();
    let text = |value: &Value, key: &str| {
        let text = value.get(key).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    };
    let errors = status.get("errors").and_then(Value::as_array);
    let errors = errors.into_iter().flatten().filter_map(Value::as_str);
    Some(LiveMember {
        id: hex(header, "member_id"),
        endpoint: text(value, "Endpoint"),
        leader: hex(status, "leader"),
        version: text(status, "version"),
        term: of("raftTerm"),
        revision: number(header, "revision").unwrap_or_default(),
        raft_index: of("raftIndex"),
        applied_index: of("raftAppliedIndex"),
        db_size: of("dbSize"),
        db_in_use: of("dbSizeInUse"),
        quota: number(status, "dbSizeQuota").filter(|quota| *quota > 0),
        is_learner: status.get("isLearner") == Some(&Value::Bool(true)),
        errors: errors.map(str::to_owned).collect(),
    })
}

/// Reads the field `key` as a number. The JSON format of Protocol Buffers writes some numbers as text.
fn number(value: &Value, key: &str) -> Option<u64> {
    match value.get(key)? {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An output of etcdctl 3.6.
    const OUTPUT: &str = r#"[{"Endpoint":"http://main-a.prod.svc:2379","Status":{"header":{"cluster_id":17237436991929493444,"member_id":9372538179322589801,"revision":8123,"raft_term":4},"version":"3.6.16","dbSize":20480,"leader":9372538179322589801,"raftIndex":9001,"raftTerm":4,"raftAppliedIndex":9001,"dbSizeInUse":16384,"storageVersion":"3.6.0","dbSizeQuota":2147483648}},{"Endpoint":"http://main-b.prod.svc:2379","Status":{"header":{"cluster_id":17237436991929493444,"member_id":10,"revision":8120,"raft_term":4},"version":"3.6.16","dbSize":20480,"leader":9372538179322589801,"raftIndex":9001,"raftTerm":4,"raftAppliedIndex":8998,"errors":["memberID:10 alarm:NOSPACE "],"dbSizeInUse":16384,"isLearner":true}}]"#;

    #[test]
    fn endpoint_status_is_parsed() {
        let members = parse(OUTPUT).unwrap();
        assert_eq!(members.len(), 2);
        assert_eq!(members[0].id, "8211f1d0f64f3269");
        assert_eq!(members[0].leader, members[0].id);
        assert_eq!((members[0].term, members[0].revision), (4, 8123));
        assert_eq!(members[0].quota, Some(2 << 30));
        assert!(members[1].is_learner && members[1].quota.is_none());
        assert_eq!(members[1].errors, ["memberID:10 alarm:NOSPACE "]);
    }

    #[test]
    fn endpoint_status_accepts_quoted_numbers_and_leading_lines() {
        let output = format!(
            "a warning\n{}",
            OUTPUT.replace("\"revision\":8123", "\"revision\":\"8123\"")
        );
        assert_eq!(parse(&output).unwrap()[0].revision, 8123);
    }

    #[test]
    fn malformed_endpoint_status_is_rejected() {
        for output in ["", "null", "[", "[1]", "{\"a\":[]}x"] {
            assert_eq!(parse(output), None, "{output}");
        }
    }

    #[test]
    fn endpoint_status_without_members_is_accepted() {
        assert_eq!(parse("[]"), Some(Vec::new()));
    }
}
