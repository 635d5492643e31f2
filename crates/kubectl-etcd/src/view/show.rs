//! Formats the views of clusters as text for the terminal.

use std::fmt::Write as _;

use jiff::Timestamp;

use super::{ClusterView, MemberView, Source};
use crate::text::{Cell, Paint, Table, Tone, bytes, distance, time};

/// From this percentage of its quota, the database is shown as nearly full.
const NEARLY_FULL: u64 = 80;

fn tone_of_state(view: &ClusterView) -> Tone {
    if view.ready {
        Tone::Good
    } else if view.available {
        Tone::Warning
    } else {
        Tone::Bad
    }
}

/// A table with one row for each cluster.
pub fn list(views: &[ClusterView], wide: bool, now: Timestamp, paint: Paint) -> String {
    let mut header = vec![
        "NAMESPACE",
        "NAME",
        "STATE",
        "HEALTHY",
        "VERSION",
        "LEADER",
        "DB",
        "ALARMS",
        "CERTIFICATE",
        "LAST BACKUP",
    ];
    if wide {
        header.extend(["CLUSTER ID", "NEXT STEP", "WAITING FOR"]);
    }
    let mut table = Table::new(&header);
    for view in views {
        let healthy = format!("{}/{}", view.healthy_members, view.desired_members);
        let all =
            i32::try_from(view.healthy_members).is_ok_and(|count| count >= view.desired_members);
        let last = view.last_backup.as_ref().and_then(|backup| backup.time);
        let mut row = vec![
            view.namespace.clone().into(),
            view.name.clone().into(),
            Cell::new(&view.state, tone_of_state(view)),
            Cell::new(healthy, if all { Tone::Good } else { Tone::Warning }),
            view.version.clone().unwrap_or_default().into(),
            view.leader.clone().unwrap_or_default().into(),
            database_cell(view),
            Cell::new(view.alarms.join(", "), Tone::Bad),
            certificate_cell(view, now),
            last.map(|at| distance(at, now)).unwrap_or_default().into(),
        ];
        if wide {
            row.extend([
                view.cluster_id.clone().unwrap_or_default().into(),
                view.next_step.clone().unwrap_or_default().into(),
                view.waiting_for.clone().unwrap_or_default().into(),
            ]);
        }
        table.add(row);
    }
    table.render(paint)
}

fn largest(view: &ClusterView) -> Option<u64> {
    view.members
        .iter()
        .filter_map(|member| member.db_size)
        .max()
}

fn percent(size: u64, quota: u64) -> u64 {
    size.saturating_mul(100)
        .checked_div(quota)
        .unwrap_or_default()
}

fn database_cell(view: &ClusterView) -> Cell {
    let Some(size) = largest(view) else {
        return Cell::default();
    };
    let share = percent(size, view.quota_bytes);
    let tone = if share >= NEARLY_FULL {
        Tone::Bad
    } else {
        Tone::Plain
    };
    Cell::new(format!("{} ({share} %)", bytes(size)), tone)
}

fn certificate_cell(view: &ClusterView, now: Timestamp) -> Cell {
    view.certificate
        .as_ref()
        .map_or_else(Cell::default, |certificate| {
            let tone = if certificate.not_after <= now {
                Tone::Bad
            } else if certificate.expires_within.is_some() {
                Tone::Warning
            } else {
                Tone::Plain
            };
            Cell::new(distance(certificate.not_after, now), tone)
        })
}

/// All details of one cluster.
pub fn details(view: &ClusterView, wide: bool, now: Timestamp, paint: Paint) -> String {
    let mut text = String::new();
    let mut line = |name: &str, content: &str| {
        let _ = writeln!(
            text,
            "{}  {content}",
            paint.paint(&format!("{name:<12}"), Tone::Bold)
        );
    };
    line("Cluster", &headline(view, paint));
    line("Version", &version(view));
    line("Database", &database(view, paint));
    let alarms = if view.alarms.is_empty() {
        "none".to_owned()
    } else {
        paint.paint(&view.alarms.join(", "), Tone::Bad)
    };
    line("Alarms", &alarms);
    line("Certificate", &certificate(view, now));
    line("Last backup", &last_backup(view, now));
    for backup in &view.backups {
        let verified = if backup.verified {
            "checksum verified"
        } else {
            "not verified"
        };
        let next = backup.next.as_deref().unwrap_or("no next backup");
        line(
            "Backup",
            &format!("{}: {}, {verified}; {next}", backup.name, backup.state),
        );
    }
    line("Next step", view.next_step.as_deref().unwrap_or("none"));
    line(
        "Waits for",
        view.waiting_for.as_deref().unwrap_or("nothing"),
    );
    for problem in &view.problems {
        let (name, tone) = if problem.advice {
            ("Advice", Tone::Warning)
        } else {
            ("Problem", Tone::Bad)
        };
        let what = format!("{} {}", problem.condition, problem.reason);
        line(
            name,
            &format!("{}: {}", paint.paint(&what, tone), problem.message),
        );
    }
    if !view.up_to_date {
        line(
            "Note",
            "the operator has not reconciled the newest spec yet, so the status belongs to an older spec",
        );
    }
    if let Some(why) = &view.source_problem {
        let text = match view.source {
            Source::Status => format!(
                "the members could not be queried ({why}), so the numbers come from the status of the EtcdCluster"
            ),
            Source::Members => format!("not all members answered: {why}"),
        };
        line("Note", &paint.paint(&text, Tone::Warning));
    }
    text.push('\n');
    if view.members.is_empty() {
        text.push_str("The cluster has no members.\n");
    } else {
        text.push_str(&members(view, wide, paint));
    }
    text
}

fn headline(view: &ClusterView, paint: Paint) -> String {
    let state = paint.paint(&view.state, tone_of_state(view));
    let available = if view.available {
        "available"
    } else {
        "not available"
    };
    let id = view.cluster_id.as_deref().unwrap_or("not formed");
    format!(
        "{}/{}: {state}, {available}, {} of {} members healthy, ID {id}",
        view.namespace, view.name, view.healthy_members, view.desired_members
    )
}

fn version(view: &ClusterView) -> String {
    match &view.version {
        Some(running) if *running == view.desired_version => running.clone(),
        Some(running) => format!("{running}, spec.version is {}", view.desired_version),
        None => format!("unknown, spec.version is {}", view.desired_version),
    }
}

fn database(view: &ClusterView, paint: Paint) -> String {
    let Some(size) = largest(view) else {
        return "unknown".to_owned();
    };
    let share = percent(size, view.quota_bytes);
    let text = format!("{} of {} ({share} %)", bytes(size), bytes(view.quota_bytes));
    let tone = if share >= NEARLY_FULL {
        Tone::Bad
    } else {
        Tone::Plain
    };
    let used = view
        .members
        .iter()
        .filter_map(|member| member.db_size_in_use)
        .max();
    let used = used
        .map(|used| format!(", {} in use", bytes(used)))
        .unwrap_or_default();
    let revision = view
        .members
        .iter()
        .filter_map(|member| member.revision)
        .max();
    let revision = revision
        .map(|it| format!(", revision {it}"))
        .unwrap_or_default();
    format!("{}{used}{revision}", paint.paint(&text, tone))
}

fn certificate(view: &ClusterView, now: Timestamp) -> String {
    view.certificate.as_ref().map_or_else(
        || "none".to_owned(),
        |certificate| {
            let key = certificate
                .key
                .as_deref()
                .map(|key| format!(" ({key})"))
                .unwrap_or_default();
            format!(
                "the first to expire is Secret {}{key}: {}, {}",
                certificate.secret,
                time(certificate.not_after),
                distance(certificate.not_after, now)
            )
        },
    )
}

fn last_backup(view: &ClusterView, now: Timestamp) -> String {
    let Some(backup) = &view.last_backup else {
        return "none known".to_owned();
    };
    let age = backup.time.map(|at| distance(at, now));
    let mut text = format!(
        "{} by EtcdBackup {}",
        age.as_deref().unwrap_or("unknown time"),
        backup.name
    );
    if let Some(revision) = backup.revision {
        let _ = write!(text, ", revision {revision}");
    }
    if let Some(behind) = backup.behind {
        let _ = write!(text, " ({behind} revisions behind)");
    }
    if let Some(location) = &backup.location {
        let _ = write!(text, ", {location}");
    }
    text
}

fn members(view: &ClusterView, wide: bool, paint: Paint) -> String {
    let mut header = vec![
        "MEMBER", "ROLE", "HEALTHY", "VERSION", "TERM", "REVISION", "LAG", "DB", "IN USE", "POD",
    ];
    if wide {
        header.extend(["ID", "RAFT INDEX", "RESTARTS", "NODE", "ERRORS"]);
    }
    let mut table = Table::new(&header);
    for member in &view.members {
        table.add(row(member, wide));
    }
    table.render(paint)
}

fn row(member: &MemberView, wide: bool) -> Vec<Cell> {
    let number = |number: Option<u64>| number.map(|it| it.to_string()).unwrap_or_default();
    let bytes_of = |size: Option<u64>| size.map(bytes).unwrap_or_default();
    let healthy = if member.healthy {
        Cell::new("yes", Tone::Good)
    } else {
        Cell::new("no", Tone::Bad)
    };
    let pod_tone = if member.pod == "Running" {
        Tone::Plain
    } else {
        Tone::Bad
    };
    let mut row = vec![
        member.name.clone().into(),
        member.role.clone().unwrap_or_default().into(),
        healthy,
        member.version.clone().unwrap_or_default().into(),
        number(member.term).into(),
        number(member.revision).into(),
        number(member.lag).into(),
        bytes_of(member.db_size).into(),
        bytes_of(member.db_size_in_use).into(),
        Cell::new(&member.pod, pod_tone),
    ];
    if wide {
        row.extend([
            member.id.clone().unwrap_or_default().into(),
            number(member.raft_index).into(),
            member.restarts.to_string().into(),
            member.node.clone().unwrap_or_default().into(),
            Cell::new(member.errors.join(", "), Tone::Bad),
        ]);
    }
    row
}
