// Program linearize checks whether a history of operations on etcd keys is linearizable, with porcupine, the checker of
// etcd's own robustness tests.
//
// It reads one JSON object per line. It exits with 0 if the history is linearizable, with 1 if it is not or if the
// check takes too long, and with 2 if the input is invalid.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// explained is the maximum number of operations in each list that [explain] prints.
const explained = 6

// operation is one line of the history.
type operation struct {
	Client int    `json:"client"`
	Key    string `json:"key"`
	// Kind is get, put or swap. A swap writes if the key has the expected value.
	Kind string `json:"kind"`
	// Value is the written value. No two operations write the same value.
	Value  string `json:"value,omitempty"`
	Expect string `json:"expect,omitempty"`
	// Call and Return are nanoseconds since the start. Return is nil if the outcome is unknown.
	Call   int64  `json:"call"`
	Return *int64 `json:"return"`
	// Swapped is true if a swap has written.
	Swapped bool `json:"swapped,omitempty"`
	// Found is the value that a get or a failed swap has read. It is empty if the key did not exist.
	Found string `json:"found,omitempty"`
	// Revision is the modification revision of the value that was written or read.
	Revision int64 `json:"revision,omitempty"`
}

func (op operation) answered() bool { return op.Return != nil }

func (op operation) writes() bool {
	return op.Kind == "put" || op.Kind == "swap" && (op.Swapped || !op.answered())
}

func (op operation) String() string {
	var text string
	switch {
	case op.Kind == "get":
		text = fmt.Sprintf("get -> %q at revision %d", op.Found, op.Revision)
	case !op.answered() && op.Kind == "put":
		text = fmt.Sprintf("put %q -> unknown", op.Value)
	case !op.answered():
		text = fmt.Sprintf("swap %q for %q -> unknown", op.Expect, op.Value)
	case op.Kind == "put":
		text = fmt.Sprintf("put %q -> revision %d", op.Value, op.Revision)
	case op.Swapped:
		text = fmt.Sprintf("swap %q for %q -> revision %d", op.Expect, op.Value, op.Revision)
	default:
		text = fmt.Sprintf("swap %q for %q -> found %q at revision %d", op.Expect, op.Value, op.Found, op.Revision)
	}
	end := "..."
	if op.answered() {
		end = seconds(*op.Return)
	}
	return fmt.Sprintf("client %d, %s to %s s: %s", op.Client, seconds(op.Call), end, text)
}

func seconds(nanoseconds int64) string {
	return fmt.Sprintf("%.3f", float64(nanoseconds)/1e9)
}

// state is the state of one key.
type state struct {
	value string
	// revision is the modification revision of the value, 0 until an answer contains it.
	revision int64
	// floor is the highest known revision of an earlier value.
	floor int64
}

func (s state) write(value string, revision int64) (bool, state) {
	floor := max(s.floor, s.revision)
	return revision == 0 || revision > floor, state{value, revision, floor}
}

func (s state) read(value string, revision int64) (bool, state) {
	if s.value != value {
		return false, s
	}
	if s.revision == 0 && value != "" {
		return revision > s.floor, state{value, revision, s.floor}
	}
	return s.revision == revision, s
}

func step(from, input, _ any) (bool, any) {
	now, op := from.(state), input.(operation)
	var ok bool
	var next state
	switch {
	case op.Kind == "get", op.Kind == "swap" && op.answered() && !op.Swapped:
		ok, next = now.read(op.Found, op.Revision)
		if op.Kind == "swap" && op.Found == op.Expect {
			ok = false
		}
	case op.Kind == "swap" && now.value != op.Expect:
		// A swap without an answer may have found another value than the expected value, and written nothing.
		ok, next = !op.answered(), now
	default:
		ok, next = now.write(op.Value, op.Revision)
	}
	return ok, next
}

var model = porcupine.Model{
	Init:              func() any { return state{} },
	Step:              step,
	DescribeOperation: func(input, _ any) string { return input.(operation).String() },
	DescribeState:     func(s any) string { return fmt.Sprintf("%+v", s) },
}

// decode reads the history and groups it by key.
func decode(input io.Reader) (map[string][]operation, error) {
	keys, written := map[string][]operation{}, map[string]bool{}
	lines := bufio.NewScanner(input)
	lines.Buffer(nil, 1<<20)
	for number := 1; lines.Scan(); number++ {
		decoder := json.NewDecoder(strings.NewReader(lines.Text()))
		decoder.DisallowUnknownFields()
		var op operation
		if err := decoder.Decode(&op); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if op.Kind != "get" && op.Kind != "put" && op.Kind != "swap" {
			return nil, fmt.Errorf("line %d: unknown kind %q", number, op.Kind)
		}
		if op.Kind != "get" && (op.Value == "" || written[op.Value]) {
			return nil, fmt.Errorf("line %d: the value %q is empty or written twice", number, op.Value)
		}
		if op.Kind != "get" {
			written[op.Value] = true
		}
		keys[op.Key] = append(keys[op.Key], op)
	}
	return keys, lines.Err()
}

// operations returns the operations of one key for porcupine.
//
// The end of a write without an answer is unknown. With many such writes, the check would exceed its time limit. Values
// are unique, so the end of the first operation that observed the value of the write is used as the end of the write.
// A write whose value no operation observed does not change the verdict, and is omitted. A read without an answer is
// omitted too.
func operations(history []operation) []porcupine.Operation {
	observed := map[string]int64{}
	observe := func(value string, at int64) {
		if first, known := observed[value]; !known || at < first {
			observed[value] = at
		}
	}
	for _, op := range history {
		if !op.answered() {
			continue
		}
		observe(op.Found, *op.Return)
		if op.Swapped {
			observe(op.Expect, *op.Return)
		}
	}
	var all []porcupine.Operation
	for _, op := range history {
		var end int64
		if op.answered() {
			end = *op.Return
		} else {
			at, known := observed[op.Value]
			if !known || !op.writes() {
				continue
			}
			end = max(at, op.Call)
		}
		all = append(all, porcupine.Operation{ClientId: op.Client, Input: op, Call: op.Call, Return: end})
	}
	return all
}

// explain prints the last operations of the longest linearizable order, and the first operations that are not in this
// order.
func explain(info porcupine.LinearizationInfo, all []porcupine.Operation) {
	var longest []int
	for _, partition := range info.PartialLinearizations() {
		for _, order := range partition {
			if len(order) > len(longest) {
				longest = order
			}
		}
	}
	fmt.Printf("  %d of %d operations have a valid order; its last operations:\n", len(longest), len(all))
	within := map[int]bool{}
	for _, id := range longest {
		within[id] = true
	}
	for _, id := range longest[max(0, len(longest)-explained):] {
		fmt.Println("    " + all[id].Input.(operation).String())
	}
	var left []operation
	for id, op := range all {
		if !within[id] {
			left = append(left, op.Input.(operation))
		}
	}
	sort.Slice(left, func(i, j int) bool { return left[i].Call < left[j].Call })
	fmt.Println("  the first operations that do not fit:")
	for _, op := range left[:min(len(left), explained)] {
		fmt.Println("    " + op.String())
	}
}

func check(keys map[string][]operation, limit time.Duration, pages string) (bool, error) {
	names := make([]string, 0, len(keys))
	for name := range keys {
		names = append(names, name)
	}
	sort.Strings(names)
	good, checked := true, 0
	for _, name := range names {
		all := operations(keys[name])
		checked += len(all)
		result, info := porcupine.CheckOperationsVerbose(model, all, limit)
		switch result {
		case porcupine.Ok:
			continue
		case porcupine.Unknown:
			fmt.Printf("key %s: no verdict on %d operations within %s\n", name, len(all), limit)
		case porcupine.Illegal:
			fmt.Printf("key %s: not linearizable\n", name)
			explain(info, all)
			if pages != "" {
				page := filepath.Join(pages, strings.ReplaceAll(name, "/", "-")+".html")
				if err := porcupine.VisualizePath(model, info, page); err != nil {
					return false, err
				}
				fmt.Println("  the whole history of the key: " + page)
			}
		}
		good = false
	}
	if good {
		fmt.Printf("linearizable: %d operations on %d keys\n", checked, len(names))
	}
	return good, nil
}

func run() (bool, error) {
	limit := flag.Duration("limit", time.Minute, "longest check of one key")
	pages := flag.String("pages", "", "folder for HTML pages that show violations")
	flag.Parse()
	keys, err := decode(os.Stdin)
	if err != nil {
		return false, err
	}
	return check(keys, *limit, *pages)
}

func main() {
	good, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	if !good {
		os.Exit(1)
	}
}
